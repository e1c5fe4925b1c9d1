"""The database of the service, on SQLite or PostgreSQL: tables, migrations, and every statement that is sent.

Nothing outside this folder knows SQL. The rules of keys and limits stand in ``keys`` and ``ledger``.
"""

from streamtap.server.db.database import Database

__all__ = ["Database"]
