"""Folders in which a push is put together, and which go away with it, also when it is killed."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Draft:
    """A new hidden folder ``.<name>.<pid>.….part`` under ``parent``, held by this process until ``close``."""

    def __init__(self, parent: Path, name: str) -> None:
        """Remove the drafts of that name whose processes have ended, and make one.

        Raises:
            OSError: ``parent`` cannot be made or written to.
        """
        parent.mkdir(parents=True, exist_ok=True)
        with locked(parent):
            _remove_abandoned(parent, name)
            self.folder = parent / f".{name}.{os.getpid()}.{secrets.token_hex(4)}.part"
            self.folder.mkdir()
            self._fd = os.open(self.folder, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(self._fd, fcntl.LOCK_EX)

    def room(self, path: str) -> Path:
        """Where ``path`` lies in the draft; its folder exists."""
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        return file

    def close(self) -> None:
        """Remove what is still there; may be called twice."""
        if self._fd < 0:
            return
        if self.folder.exists():
            shutil.rmtree(self.folder)
        os.close(self._fd)
        self._fd = -1


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep out every other process and thread that does the same; a lock ends with its process."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _remove_abandoned(parent: Path, name: str) -> None:
    drafts = re.compile(rf"\.{re.escape(name)}\.\d+\.[0-9a-f]{{8}}\.part")
    for folder in [each for each in parent.iterdir() if drafts.fullmatch(each.name)]:
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY | os.O_NOFOLLOW)
        except (FileNotFoundError, NotADirectoryError):
            # Its owner closed it just now, or it is no draft.
            continue
        try:
            # A lock says who is alive; a pid would say it on one machine only.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            if folder.exists():
                shutil.rmtree(folder)
        finally:
            os.close(fd)
