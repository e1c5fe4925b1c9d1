"""An engine of SQLAlchemy for the address in the settings, set up for many threads and processes at once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError

from streamtap.errors import MissingExtra, SettingsError

#: How long a writer waits for another process's, in seconds.
BUSY_SECONDS = 30
#: Execution option of a connection that is going to write.
WRITES = "streamtap_writes"
_KINDS = ("sqlite", "postgresql")


def connect(address: str) -> Engine:
    """An engine for ``address``, such as ``sqlite:////var/lib/streamtap.db`` or ``postgresql+psycopg://user@host/name``.

    SQLite's file and its folder are made, for this user alone. Nothing is asked of the database yet.

    Raises:
        SettingsError: an address of another kind, or none at all.
        MissingExtra: the driver is not installed.
    """
    url = _checked(address)
    try:
        return _sqlite(url) if url.get_backend_name() == "sqlite" else _postgresql(url)
    except ModuleNotFoundError as error:
        raise MissingExtra("the service's database needs its driver: pip install 'streamtap[serve]'.") from error


def shown(url: URL | str) -> str:
    """The address without its password."""
    return make_url(url).render_as_string(hide_password=True)


def _checked(address: str) -> URL:
    try:
        url = make_url(address)
    except ArgumentError:
        # Its own text holds the address, and that may hold a password.
        raise SettingsError(
            "database must be an address such as sqlite:////path/streamtap.db or postgresql+psycopg://user@host/name."
        ) from None
    if url.get_backend_name() not in _KINDS:
        raise SettingsError(f"database must be sqlite or postgresql+psycopg; got {url.drivername!r}.")
    if url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:"):
        raise SettingsError(
            "database must name a file, sqlite:////path/streamtap.db: one in memory is lost at the end."
        )
    return url.set(drivername="postgresql+psycopg") if url.drivername == "postgresql" else url


def _postgresql(url: URL) -> Engine:
    # hide_parameters: an error of the driver must not carry what was being written into a log.
    return create_engine(
        url, hide_parameters=True, pool_pre_ping=True, pool_size=10, max_overflow=20, pool_timeout=BUSY_SECONDS
    )


def _sqlite(url: URL) -> Engine:
    _make_file(Path(str(url.database)))
    engine = create_engine(
        url, hide_parameters=True, pool_size=10, max_overflow=40, connect_args={"timeout": BUSY_SECONDS}
    )
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_sqlite)
    return engine


def _make_file(file: Path) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(file, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError as error:
        raise SettingsError(
            f"the database {file} cannot be opened: {error.strerror}; name another with database."
        ) from error


def _prepare_sqlite(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # we say BEGIN ourselves
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")


def _begin_sqlite(connection: Connection) -> None:
    # A transaction that reads first and writes then cannot wait for its lock: it must take it at once.
    writes = connection.get_execution_options().get(WRITES, False)
    driver = connection.connection.dbapi_connection
    assert driver is not None
    driver.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
