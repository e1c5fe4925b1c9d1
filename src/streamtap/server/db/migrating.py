"""Schema changes: each is a file in ``migrations/versions``, run once, in order, in one transaction."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from sqlalchemy import Connection, Engine, inspect, text

from streamtap.errors import SettingsError
from streamtap.server.db.connecting import shown

#: The newest version; a test holds it to the files.
NEWEST = "0002"
#: Ours alone, in a database that others may use too.
VERSION_TABLE = "streamtap_schema"
#: Any number that all gateways agree on: they take turns by it on PostgreSQL.
_TURN = 7_305_601


def migrate(engine: Engine, writing: Callable[[], AbstractContextManager[Connection]]) -> None:
    """Bring the schema up to date, or do nothing where it is.

    Raises:
        SettingsError: a schema that this version does not know.
    """
    with engine.connect() as connection:
        if _version(connection) == NEWEST:
            return
    with writing() as connection:
        if engine.dialect.name == "postgresql":
            connection.execute(text("SELECT pg_advisory_xact_lock(:turn)"), {"turn": _TURN})
        # Again, for another process may have been at it while this one waited.
        if (found := _version(connection)) != NEWEST:
            _upgrade(connection, found)


def _version(connection: Connection) -> str | None:
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    found: str | None = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar()
    return found


def _upgrade(connection: Connection, found: str | None) -> None:
    # Half a second to import, and of no use to a process that finds its schema in order.
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if found is not None and found not in known:
        raise SettingsError(
            f"the database {shown(connection.engine.url)} has schema {found}, which a newer Streamtap made; this one "
            f"knows up to {NEWEST}: upgrade Streamtap, or name another database."
        )
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
