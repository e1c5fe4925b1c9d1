"""Files whose hash was compared with the manifest, so that each is read for that once."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from streamtap.dataset.manifest import FileSum
from streamtap.fingerprint import fingerprint


def is_content(file: Path, expected: FileSum) -> bool:
    """Whether ``file`` has the size and hash expected; reads it."""
    if file.stat().st_size != expected.size_bytes:
        return False
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() == expected.sha256


class CheckedFiles:
    """Remembers, across processes, files that had the right content when they were last changed.

    The ledger is a text file of one short line a file, which several processes may append to.
    """

    def __init__(self, folder: Path) -> None:
        self._ledger = folder / "checked.txt"
        self._known: set[bytes] | None = None

    def is_whole(self, file: Path, expected: FileSum) -> bool:
        """Whether ``file`` has the size and hash expected; it is read only when it is new or was changed."""
        about = file.stat()
        if about.st_size != expected.size_bytes:
            return False
        seen = {
            "file": str(file.resolve()),
            "size": about.st_size,
            "changed": about.st_mtime_ns,
            "inode": about.st_ino,
            "sha256": expected.sha256,
        }
        line = fingerprint(seen).encode()
        if self._known is None:
            self._known = set(self._ledger.read_bytes().split()) if self._ledger.exists() else set()
        if line in self._known:
            return True
        if not is_content(file, expected):
            return False
        self._remember(line)
        return True

    def _remember(self, line: bytes) -> None:
        assert self._known is not None
        self._known.add(line)
        self._ledger.parent.mkdir(parents=True, exist_ok=True)
        # One write in append mode is not torn by another process's; the first newline ends a line cut by a crash.
        handle = os.open(self._ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(handle, b"\n" + line + b"\n")
        finally:
            os.close(handle)
