"""One gateway a data folder: its successor takes for granted that whatever a folder's gateway held is free again."""

from __future__ import annotations

import fcntl
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from streamtap.errors import SettingsError

_LOCK = "gateway.lock"
_OWNER = re.compile(rb"[0-9a-f]{32}")


@contextmanager
def only_gateway_of(data_dir: Path) -> Iterator[str]:
    """Hold the folder, which is made, for this process until the block ends or the process does, however it does.

    The value is the folder's own name among the owners of a ledger: the next gateway here has it again, on whatever
    host, and no other folder has it unless it is a copy.

    Raises:
        SettingsError: another process holds it, or it cannot be made.
    """
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        lock = os.open(data_dir / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise SettingsError(f"data_dir {data_dir} cannot be used: {error.strerror}; name another.") from error
    try:
        _take(lock, data_dir)
        yield _owner(lock, data_dir)
    finally:
        os.close(lock)


def _take(lock: int, data_dir: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise SettingsError(
            f"another gateway uses data_dir {data_dir}; stop it, or give this one a folder of its own with --data-dir."
        ) from error


def _owner(lock: int, data_dir: Path) -> str:
    """What the lock file says, or a new name that is kept in it."""
    found = os.pread(lock, 64, 0)
    if not _OWNER.fullmatch(found):
        found = uuid.uuid4().hex.encode()
        try:
            os.ftruncate(lock, 0)
            os.pwrite(lock, found, 0)
            os.fsync(lock)
        except OSError as error:
            raise SettingsError(f"data_dir {data_dir} cannot be written: {error.strerror}; name another.") from error
    return found.decode()
