"""Byte ranges of remote files, kept on disk so that a second read needs no network.

Each remote file has two local ones: a sparse copy with the ranges at their true offsets, and a
ledger with a line for each piece of at most ``PIECE_BYTES``: start, stop, checksum. Every piece is
checked when it is read, so nothing has to be flushed: what a crash or another program damaged is
not wrong bytes but a range that is not held.
"""

from __future__ import annotations

import hashlib
import os
import re
from bisect import bisect_left, insort
from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from urllib.parse import quote

#: Bounds what is read and hashed besides the bytes that were asked for.
PIECE_BYTES = 1 << 18
_SUM_BYTES = 16
_LINE = re.compile(rb"^(\d{1,18}) (\d{1,18}) ([0-9a-f]{32})$", re.MULTILINE)
_LONGEST_NAME = 200

_Piece = tuple[int, int, str]


class RangeStore:
    """The ranges of many files under one folder, which is made when it is needed.

    Threads and processes may read and write at the same time. A path names one unchanging file:
    for a new version of it, take another path or ``forget`` the old one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = Lock()
        self._ledgers: dict[str, _Ledger] = {}

    def read(self, path: str, start: int, stop: int) -> bytes | None:
        """Bytes [start, stop) of ``path``; None unless all of them are held and right."""
        if stop <= start:
            return b""
        bytes_file, ledger_file = self._files(path)
        with self._lock:
            ledger = self._ledgers.setdefault(path, _Ledger())
        with ledger.lock:
            try:
                ledger.update(ledger_file)
                with bytes_file.open("rb", buffering=0) as stream:
                    return _covered(path, stream.fileno(), ledger, start, stop)
            except FileNotFoundError:
                return None

    def write(self, path: str, start: int, data: bytes) -> None:
        """Keep ``data``, which lies at ``start`` in ``path``."""
        if not data:
            return
        bytes_file, ledger_file = self._files(path)
        bytes_file.parent.mkdir(parents=True, exist_ok=True)
        _write_at(bytes_file, start, data)
        lines = "".join(f"{first} {last} {digest}\n" for first, last, digest in _pieces(path, start, data))
        fd = os.open(ledger_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            # One write, so that no other process's line comes between; the first newline ends a line cut by a crash.
            os.write(fd, b"\n" + lines.encode())
        finally:
            os.close(fd)

    def forget(self, path: str) -> None:
        """Hold nothing of ``path`` any more."""
        for file in self._files(path):
            file.unlink(missing_ok=True)
        with self._lock:
            self._ledgers.pop(path, None)

    def _files(self, path: str) -> tuple[Path, Path]:
        name = quote(path, safe="")
        if len(name) > _LONGEST_NAME:
            # No quoted name holds a % before a letter above F.
            name = "%sha256-" + hashlib.sha256(path.encode()).hexdigest()
        return self._folder / f"{name}.bytes", self._folder / f"{name}.ledger"


class _Ledger:
    """What a ledger file says, read on where the last look at it ended."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.pieces: list[_Piece] = []
        self._seen = (0, 0)

    def update(self, file: Path) -> None:
        with file.open("rb") as stream:
            state = os.fstat(stream.fileno())
            if state.st_ino != self._seen[0] or state.st_size < self._seen[1]:
                self.pieces, self._seen = [], (state.st_ino, 0)
            if state.st_size == self._seen[1]:
                return
            stream.seek(self._seen[1])
            tail = stream.read()
        whole = tail[: tail.rfind(b"\n") + 1]
        self._seen = (state.st_ino, self._seen[1] + len(whole))
        for start, stop, digest in _LINE.findall(whole):
            self._add((int(start), int(stop), digest.decode()))

    def _add(self, piece: _Piece) -> None:
        place = bisect_left(self.pieces, piece)
        if 0 < piece[1] - piece[0] <= PIECE_BYTES and self.pieces[place : place + 1] != [piece]:
            insort(self.pieces, piece)

    def over(self, position: int) -> list[_Piece]:
        """The pieces that hold the byte at ``position``, the one that reaches farthest first."""
        first = bisect_left(self.pieces, (position - PIECE_BYTES, 0, ""))
        last = bisect_left(self.pieces, (position + 1, 0, ""))
        near = [piece for piece in self.pieces[first:last] if piece[1] > position]
        return sorted(near, key=lambda piece: piece[1], reverse=True)


def _covered(path: str, fd: int, ledger: _Ledger, start: int, stop: int) -> bytes | None:
    """Bytes [start, stop) put together from whole pieces; pieces that turn out damaged leave the ledger."""
    found = bytearray()
    while (position := start + len(found)) < stop:
        for piece in ledger.over(position):
            data = os.pread(fd, piece[1] - piece[0], piece[0])
            if _sum(path, piece[0], piece[1], data) == piece[2]:
                found += data[position - piece[0] : stop - piece[0]]
                break
            ledger.pieces.remove(piece)
        else:
            return None
    return bytes(found)


def _pieces(path: str, start: int, data: bytes) -> Iterator[_Piece]:
    for offset in range(0, len(data), PIECE_BYTES):
        piece = data[offset : offset + PIECE_BYTES]
        first, last = start + offset, start + offset + len(piece)
        yield first, last, _sum(path, first, last, piece)


def _sum(path: str, start: int, stop: int, data: bytes) -> str:
    """Checksum of a piece and of where it belongs: two paths may meet in one file where case does not count."""
    state = hashlib.blake2b(f"{path}\n{start}\n{stop}\n".encode(), digest_size=_SUM_BYTES)
    state.update(data)
    return state.hexdigest()


def _write_at(file: Path, start: int, data: bytes) -> None:
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        rest = memoryview(data)
        while rest:
            written = os.pwrite(fd, rest, start)
            rest, start = rest[written:], start + written
    finally:
        os.close(fd)
