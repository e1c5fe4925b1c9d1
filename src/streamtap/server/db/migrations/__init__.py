"""Alembic's folder: ``env`` runs the versions on the connection that ``migrating`` hands it."""
