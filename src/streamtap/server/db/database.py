"""``Database``: one open database of the service."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from streamtap.errors import SettingsError
from streamtap.server.db.connecting import WRITES, connect, shown
from streamtap.server.db.migrating import migrate


class Database:
    """An open database with today's schema; all threads of a process share one."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._writing_engine = engine.execution_options(**{WRITES: True})
        self.is_sqlite = engine.dialect.name == "sqlite"
        # SQLite lets one write at a time, and its own waiting is a poll that can pass a thread over for long.
        self._turn = threading.Lock()
        # So there is one connection to write with, and taking one out anew each time takes longer than most writes.
        self._writer: Connection | None = None

    @classmethod
    def open(cls, address: str) -> Database:
        """Open the database at ``address`` and bring its schema up to date; several processes may do so at once.

        Raises:
            SettingsError: no such kind of database, one that does not answer or is something else, or one whose schema
                a newer Streamtap made.
            MissingExtra: the driver is not installed.
        """
        database = cls(connect(address))
        try:
            migrate(database._engine, database.writing)
        except (DBAPIError, sqlite3.Error) as error:
            database.close()
            reason = " ".join(str(getattr(error, "orig", error)).split())
            raise SettingsError(f"the database {shown(address)} cannot be opened: {reason}.") from error
        except SettingsError:
            database.close()
            raise
        return database

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction that changes something; it is kept when the block ends and undone when the block raises."""
        if not self.is_sqlite:
            with self._writing_engine.begin() as connection:
                yield connection
            return
        with self._turn:
            if self._writer is None:
                self._writer = self._writing_engine.connect()
            with self._writer.begin():
                yield self._writer

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A transaction that only reads, which no writer holds up on either database."""
        with self._engine.connect() as connection:
            yield connection

    def close(self) -> None:
        """Close every connection; an open transaction of another thread ends first."""
        with self._turn:
            if self._writer is not None:
                self._writer.close()
                self._writer = None
        self._engine.dispose()
