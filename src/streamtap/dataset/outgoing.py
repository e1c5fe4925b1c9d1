"""Room on this machine for files that are on their way out.

Each user of it has a folder and a locked file beside it. The lock ends with the process, so whoever
comes next knows which folders belong to nobody any more, on this machine or another one that shares the disk.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from contextlib import suppress
from pathlib import Path
from threading import Lock
from uuid import uuid4

_LOCK = ".lock"


class Outgoing:
    """One user's folder under ``root``, made at the first ``room`` and gone after ``close``."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._guard = Lock()
        self._folder: Path | None = None
        self._fd: int | None = None

    def room(self, path: str) -> Path:
        """Where to write the file ``path``; the folder that it lies in exists."""
        with self._guard:
            if self._folder is None:
                self._folder, self._fd = _new_folder(self._root)
            file = self._folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        return file

    def close(self) -> None:
        """Remove the folder and all that is in it."""
        with self._guard:
            if self._folder is not None and self._fd is not None:
                _remove(self._folder, self._fd)
            self._folder = self._fd = None

    def sweep(self) -> None:
        """Remove what processes that are dead left behind."""
        for lock in sorted(self._root.glob(f"*{_LOCK}")):
            with suppress(FileNotFoundError):
                fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
                if _locked(fd) and _is_open_on(fd, lock):
                    _remove(lock.with_suffix(""), fd)
                else:
                    os.close(fd)


def _new_folder(root: Path) -> tuple[Path, int]:
    root.mkdir(parents=True, exist_ok=True)
    while True:
        folder = root / uuid4().hex
        lock = folder.with_suffix(_LOCK)
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        # Somebody's sweep may have come between the two steps.
        if _locked(fd) and _is_open_on(fd, lock):
            folder.mkdir()
            return folder, fd
        os.close(fd)


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_open_on(fd: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), file.stat())
    except FileNotFoundError:
        return False


def _remove(folder: Path, fd: int) -> None:
    """The folder first: a lock without a folder is nothing, a folder without a lock would stay for ever."""
    try:
        if folder.exists():
            shutil.rmtree(folder)
        folder.with_suffix(_LOCK).unlink(missing_ok=True)
    finally:
        os.close(fd)
