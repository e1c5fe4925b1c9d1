"""Stretches of a file read straight to where they belong."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

#: Reading so much more costs less than another call, and less than a disk's leap.
_GAP_BYTES = 1 << 15
#: Pieces that one system call takes.
_MOST_PIECES = 1000


def read_spans(path: Path, spans: Sequence[tuple[int, int]], into: Sequence[memoryview]) -> None:
    """Read bytes [start, stop) of ``path`` into the buffer of the same place in ``into``, which has their length.

    The system is told of all of them first, so that it reads the next while one is copied.

    Raises:
        FileNotFoundError: there is no such file.
        EOFError: it ends before.
    """
    pairs = sorted(zip(spans, into, strict=True), key=lambda pair: pair[0])
    calls = list(_calls(pairs))
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if hasattr(os, "posix_fadvise"):
            for start, pieces in calls:
                os.posix_fadvise(fd, start, sum(map(len, pieces)), os.POSIX_FADV_WILLNEED)
        for start, pieces in calls:
            _fill(fd, start, pieces)
    finally:
        os.close(fd)


def _calls(pairs: Sequence[tuple[tuple[int, int], memoryview]]) -> Iterator[tuple[int, list[memoryview]]]:
    """Where each call starts, and the buffers that it fills; what lies in a small gap is thrown away."""
    rest = memoryview(bytearray(_GAP_BYTES))
    first = end = 0
    pieces: list[memoryview] = []
    for (start, stop), buffer in pairs:
        if start == stop:
            continue
        gap = start - end
        if pieces and (not 0 <= gap <= _GAP_BYTES or len(pieces) + 2 > _MOST_PIECES):
            yield first, pieces
            pieces = []
        if not pieces:
            first = start
        elif gap:
            pieces.append(rest[:gap])
        pieces.append(buffer)
        end = stop
    if pieces:
        yield first, pieces


def _fill(fd: int, start: int, pieces: list[memoryview]) -> None:
    left = pieces
    while left:
        done = os.preadv(fd, left, start)
        if not done:
            raise EOFError
        start += done
        left = list(_after(left, done))


def _after(pieces: Sequence[memoryview], done: int) -> Iterator[memoryview]:
    """What of ``pieces`` comes after their first ``done`` bytes."""
    for piece in pieces:
        if done < len(piece):
            yield piece[done:]
        done = max(0, done - len(piece))
