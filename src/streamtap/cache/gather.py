"""Copying rows out of mapped part files, and checking them on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamtap.cache.layout import POSITIONS, SUMS, TOKEN_IDS, ChunkLayout, stored_dtype
from streamtap.cache.partfile import map_chunks, read_into, whole_chunks
from streamtap.cache.parts import Part, part_path
from streamtap.cache.sums import stamps, token_words, word_sums

Array = NDArray[Any]
Ints = NDArray[np.int64]
_PAGE_BYTES = 4096
_THREADS_FROM_BYTES = 1 << 23
_MAPPED_CHUNKS = 128


@dataclass(frozen=True)
class Target:
    """Where rows are gathered: all are [rows, …]; ``bad`` is True where a checksum differs."""

    values: Array
    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    bad: NDArray[np.bool_]

    @classmethod
    def empty(cls, part: Part, channel: str, n_rows: int) -> Target:
        """Room for ``n_rows`` of a channel of ``part``."""
        kind = part.layout.channel(channel)
        data = _room(n_rows * kind.row_bytes, part.layout.offsets[channel])
        values = data.view(stored_dtype(kind.dtype)).reshape(n_rows, kind.width)
        return cls(values, np.empty(n_rows, np.int32), np.empty(n_rows, np.int32), np.zeros(n_rows, np.bool_))


def gather(root: Path, part: Part, channel: str, rows: Ints, wanted: Ints, target: Target) -> None:
    """Put ``rows`` of a part to the places ``wanted`` of ``target``; what the file lacks is bad.

    Both are int64 [rows], in any order; a row may be wanted twice.
    """
    try:
        file = part_path(root, part.id).open("rb")
    except FileNotFoundError:
        target.bad[wanted] = True
        return
    with file:
        there = rows < whole_chunks(file, part.layout) * part.layout.rows_per_chunk
        if not there.all():
            target.bad[wanted[~there]] = True
            rows, wanted = rows[there], wanted[there]
        if not _ascending(rows):
            order = np.argsort(rows, kind="stable")
            rows, wanted = rows[order], wanted[order]
        if len(rows) and _one_run(rows) and _one_run(wanted):
            _Source(file.fileno(), np.empty(0, part.layout.dtype), 0, part.layout, channel).copy(rows, wanted, target)
            return
        # What is mapped counts as this process's memory, so a large part is mapped in pieces.
        for group, start, stop in by_chunk(rows, part.layout.rows_per_chunk * _MAPPED_CHUNKS):
            first = group * _MAPPED_CHUNKS
            chunks = np.asarray(map_chunks(file, part.layout, first, _MAPPED_CHUNKS))
            source = _Source(file.fileno(), chunks, first, part.layout, channel)
            source.copy(rows[start:stop], wanted[start:stop], target)


@dataclass(frozen=True)
class _Columns:
    """What is known of rows beside their values, all [rows]; ``words`` are the words that were read, added up."""

    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    token_sums: NDArray[np.uint64]
    sums: NDArray[np.uint64]
    words: NDArray[np.uint64]

    @classmethod
    def empty(cls, n_rows: int) -> _Columns:
        ids, positions = np.empty(n_rows, "<i4"), np.empty(n_rows, "<i4")
        return cls(ids, positions, *(np.empty(n_rows, "<u8") for _ in range(3)))

    def bad(self, rows: Ints) -> NDArray[np.bool_]:
        stamp = stamps(rows)
        wrong: NDArray[np.bool_] = np.not_equal(self.sums, self.words + stamp)
        wrong |= self.token_sums != token_words(self.token_ids, self.positions) + stamp
        return wrong


@dataclass(frozen=True)
class _Source:
    """One channel of an open part file, of which ``chunks`` are mapped, the first one's number being ``first``."""

    fd: int
    chunks: Array
    first: int
    layout: ChunkLayout
    channel: str

    def copy(self, rows: Ints, wanted: Ints, target: Target) -> None:
        """Copy ascending ``rows`` and check each."""
        if _one_run(rows) and _one_run(wanted):
            at: Any = slice(int(wanted[0]), int(wanted[-1]) + 1)
            columns = self._read_run(rows, target.values[at])
        else:
            at = wanted
            columns = self._pick(rows, wanted, target.values)
        target.token_ids[at], target.positions[at] = columns.token_ids, columns.positions
        target.bad[at] = columns.bad(rows)

    def _read_run(self, rows: Ints, out: Array) -> _Columns:
        """Rows that lie one after the other: reading costs less here than faults on mapped pages."""
        columns = _Columns.empty(len(rows))

        def read(chunk: int, start: int, stop: int) -> None:
            place = int(rows[start]) - chunk * self.layout.rows_per_chunk
            self._read_small(chunk, place, slice(start, stop), columns)
            piece = out[start:stop]
            row_bytes = piece.itemsize * piece.shape[1]
            base = chunk * self.layout.chunk_bytes + self.layout.offsets[self.channel]
            read_into(self.fd, [piece.view(np.uint8).reshape(-1).data], base + place * row_bytes)
            # Adding up now finds the rows still in the processor's cache.
            columns.words[start:stop] = word_sums(piece)

        self._each_chunk(rows, read)
        return columns

    def _read_small(self, chunk: int, place: int, here: slice, columns: _Columns) -> None:
        layout, base = self.layout, chunk * self.layout.chunk_bytes
        small = [columns.token_ids[here].data, columns.positions[here].data, columns.token_sums[here].data]
        offsets = [layout.offsets[TOKEN_IDS], layout.offsets[POSITIONS], layout.sums_offset(TOKEN_IDS)]
        if here.stop - here.start == layout.rows_per_chunk:
            # The three lie one after the other, so a whole chunk's come at once.
            read_into(self.fd, small, base + offsets[0])
        else:
            for data, offset in zip(small, offsets, strict=True):
                read_into(self.fd, [data], base + offset + place * data.itemsize)
        read_into(self.fd, [columns.sums[here].data], base + layout.sums_offset(self.channel) + place * 8)

    def _pick(self, rows: Ints, wanted: Ints, values: Array) -> _Columns:
        """Rows from anywhere, out of the mapped chunks, to the rows ``wanted`` of ``values``."""
        layout, chunks = self.layout, self.chunks
        number, place = np.divmod(rows, layout.rows_per_chunk)
        number -= self.first
        token_sums = chunks[SUMS][number, layout.sums_row(TOKEN_IDS), place]
        sums = chunks[SUMS][number, layout.sums_row(self.channel), place]
        token_ids, positions = chunks[TOKEN_IDS][number, place], chunks[POSITIONS][number, place]
        columns = _Columns(token_ids, positions, token_sums, sums, np.empty(len(rows), np.uint64))
        pieces = chunks[self.channel]

        def pick(chunk: int, start: int, stop: int) -> None:
            values[wanted[start:stop]] = dense = pieces[chunk - self.first][place[start:stop]]
            columns.words[start:stop] = word_sums(dense)

        self._each_chunk(rows, pick)
        return columns

    def _each_chunk(self, rows: Ints, action: Callable[[int, int, int], None]) -> None:
        """Do ``action`` for each chunk of ``rows``, the halves of many rows side by side."""
        stretches = list(by_chunk(rows, self.layout.rows_per_chunk))

        def run(some: Sequence[tuple[int, int, int]]) -> None:
            for stretch in some:
                action(*stretch)

        if len(rows) * self.layout.channel(self.channel).row_bytes < _THREADS_FROM_BYTES:
            run(stretches)
            return
        half = len(stretches) // 2
        with ThreadPoolExecutor(1) as beside:
            other = beside.submit(run, stretches[half:])
            run(stretches[:half])
            other.result()


def by_chunk(rows: Ints, rows_per_chunk: int) -> Iterator[tuple[int, int, int]]:
    """Chunk number, start and stop of each stretch of ascending ``rows`` that lies in one chunk."""
    chunks = rows // rows_per_chunk
    edges = [0, *(np.flatnonzero(np.diff(chunks)) + 1).tolist(), len(rows)]
    for start, stop in pairwise(edges):
        if stop > start:
            yield int(chunks[start]), start, stop


def _one_run(numbers: Ints) -> bool:
    return bool(numbers[-1] - numbers[0] == len(numbers) - 1) and _ascending(numbers)


def _ascending(numbers: Ints) -> bool:
    return bool((numbers[1:] > numbers[:-1]).all())


def _room(size_bytes: int, source_offset: int) -> NDArray[np.uint8]:
    """Bytes [size] that lie half a page apart from what is copied into them.

    Where source and destination have nearly the same place in their pages, processors take a load
    for a repeat of a store just before it, and a copy takes twice as long.
    """
    buffer = np.empty(size_bytes + _PAGE_BYTES, np.uint8)
    shift = (source_offset + _PAGE_BYTES // 2 - buffer.ctypes.data) % _PAGE_BYTES
    return buffer[shift : shift + size_bytes]
