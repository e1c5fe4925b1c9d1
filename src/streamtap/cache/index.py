"""The SQLite index: one connection that threads share, and transactions that end whole or not at all."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from streamtap.cache import schema
from streamtap.errors import CacheBusy, CacheDamaged, NotEnoughSpace, Unsupported

T = TypeVar("T")

_STEP = 1000
_RETRY_SECONDS = 0.02


class Connection(sqlite3.Connection):
    """A connection that also keeps what was made of the index's rows, until any of them changes."""

    _kept: dict[Hashable, Any] | None = None
    _state: tuple[int, int] | None = None

    def kept(self, key: Hashable, make: Callable[[], T]) -> T:
        """What ``make`` made for ``key``, made again where this or another process has changed the index."""
        state = (int(self.execute("PRAGMA data_version").fetchone()[0]), self.total_changes)
        if self._kept is None or state != self._state:
            self._kept, self._state = {}, state
        if key not in self._kept:
            self._kept[key] = make()
        value: T = self._kept[key]
        return value

    def undo(self) -> None:
        """Roll the open transaction back, and forget what was seen in it."""
        self.execute("ROLLBACK")
        self._kept = None


class Index:
    """The index of one cache folder; every read and write goes through ``reading`` or ``writing``.

    Raises:
        CacheBusy: others held the index for longer than ``busy_seconds``.
        CacheDamaged: the file is no SQLite database.
        Unsupported: a newer Streamtap made it, or the disk cannot hold a write-ahead log.
    """

    def __init__(self, path: Path, *, busy_seconds: float) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._db = sqlite3.connect(
            path, timeout=busy_seconds, isolation_level=None, check_same_thread=False, factory=Connection
        )
        try:
            self._prepare(busy_seconds)
        except BaseException:
            self._db.close()
            raise

    def _prepare(self, busy_seconds: float) -> None:
        with _our_errors(self.path):
            _use_write_ahead_log(self._db, self.path, time.monotonic() + busy_seconds)
            # FULL syncs the log at each commit: without it a power cut could take back the last batches.
            self._db.execute("PRAGMA synchronous = FULL")
        with self.reading() as db:
            ready = schema.is_ready(db, str(self.path))
        if not ready:
            with self.writing() as db:
                schema.create(db)

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A transaction that sees one state of the index and changes nothing."""
        with self._transaction("BEGIN") as db:
            yield db

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction that holds the write lock from the start; it commits when the block ends without an error."""
        # A deferred BEGIN would fail at its first write whenever another process wrote since its first read.
        with self._transaction("BEGIN IMMEDIATE") as db:
            yield db

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[Connection]:
        with self._lock, _our_errors(self.path):
            self._db.execute(begin)
            try:
                yield self._db
                self._commit()
            finally:
                if self._db.in_transaction:
                    self._db.undo()

    def _commit(self) -> None:
        self._db.execute("COMMIT")

    def compact(self) -> None:
        """Give the space of deleted rows back to the disk."""
        with self._lock, _our_errors(self.path):
            self._db.execute("VACUUM")
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._db.close()


def select_in(
    db: sqlite3.Connection, sql: str, before: Sequence[Any], keys: Sequence[bytes]
) -> Iterator[tuple[Any, ...]]:
    """Rows of ``sql``, whose ``{keys}`` stands for the list after IN, for any number of keys."""
    # Sorted keys walk the tree once from left to right.
    ordered = sorted(set(keys))
    for start in range(0, len(ordered), _STEP):
        some = ordered[start : start + _STEP]
        yield from db.execute(sql.format(keys=",".join("?" * len(some))), [*before, *some])


def _use_write_ahead_log(db: sqlite3.Connection, path: Path, deadline: float) -> None:
    while True:
        try:
            mode = db.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        except sqlite3.OperationalError as error:
            # SQLite does not wait by itself when two processes switch a new file at once.
            if _code(error) != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_SECONDS)
            continue
        if mode != "wal":
            raise Unsupported(f"{path} is on a disk without a write-ahead log: put the cache on a local disk.")
        return


@contextmanager
def _our_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.DatabaseError as error:
        code = _code(error)
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise CacheBusy(f"another process holds the cache index {path}; try again.") from error
        if code == sqlite3.SQLITE_FULL:
            raise NotEnoughSpace(f"the disk of {path} is full; the batch was not added to the cache.") from error
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise CacheDamaged(f"{path} is not a sound SQLite index: move the cache folder away.") from error
        raise


def _code(error: sqlite3.Error) -> int:
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF
