"""What Alembic runs; the connection, and its transaction, come from ``migrating``."""

from __future__ import annotations

from alembic import context

from streamtap.server.db.migrating import VERSION_TABLE
from streamtap.server.db.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table=VERSION_TABLE,
)
with context.begin_transaction():
    context.run_migrations()
