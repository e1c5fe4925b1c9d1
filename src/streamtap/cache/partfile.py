"""The bytes of one part file: rows written at computed offsets, rows read back and checked."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from streamtap.cache.layout import POSITIONS, TOKEN_IDS, ChunkLayout
from streamtap.cache.sums import row_sums, token_sums

Array = NDArray[Any]


class PartFile:
    """An open part file and the layout of its chunks; never trusts the file's length."""

    def __init__(self, fd: int, layout: ChunkLayout) -> None:
        self.fd = fd
        self.layout = layout

    @classmethod
    @contextmanager
    def reading(cls, path: Path, layout: ChunkLayout) -> Iterator[PartFile]:
        """Open ``path`` to read.

        Raises:
            FileNotFoundError: it is gone.
        """
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield cls(fd, layout)
        finally:
            os.close(fd)

    def write(
        self,
        first_row: int,
        values: Mapping[str, Array],
        token_ids: NDArray[np.int32],
        positions: NDArray[np.int32],
    ) -> None:
        """Put rows at ``first_row`` and wait until they are durable.

        ``values[channel]`` is [rows, width] in the channel's dtype; ``token_ids`` and
        ``positions`` are int32 [rows].
        """
        n_rows = len(token_ids)
        if not n_rows:
            return
        fields = self._fields(first_row, values, token_ids, positions)
        needed = self.layout.size_bytes(first_row + n_rows)
        if os.fstat(self.fd).st_size < needed:
            os.ftruncate(self.fd, needed)
        for segment in self.layout.segments(first_row, n_rows):
            base = segment.chunk * self.layout.chunk_bytes
            for offset, data in fields:
                piece = data[segment.start : segment.stop].reshape(-1).data
                _write_whole(self.fd, piece, base + offset + segment.place * data.shape[1])
        getattr(os, "fdatasync", os.fsync)(self.fd)  # macOS has only the second

    def _fields(
        self, first_row: int, values: Mapping[str, Array], token_ids: NDArray[np.int32], positions: NDArray[np.int32]
    ) -> list[tuple[int, NDArray[np.uint8]]]:
        """Each field's offset in a chunk and its bytes [rows, row_bytes], checksums with it."""
        layout = self.layout
        numbers = np.arange(first_row, first_row + len(token_ids), dtype=np.int64)
        fields: list[tuple[int, Array]] = [
            (layout.offsets[TOKEN_IDS], token_ids),
            (layout.offsets[POSITIONS], positions),
            (layout.sums_offset(TOKEN_IDS), token_sums(token_ids, positions, numbers)),
        ]
        for name, rows in values.items():
            dense = np.ascontiguousarray(rows)
            fields += [(layout.offsets[name], dense), (layout.sums_offset(name), row_sums(dense, numbers))]
        return [(offset, _bytes(data)) for offset, data in fields]

    def read_chunk(self, chunk: int) -> NDArray[Any]:
        """One chunk as the fields of a structured record; what lies beyond the file's end reads as zeros."""
        record = np.zeros(1, self.layout.dtype)
        read_into(self.fd, [record.view(np.uint8).data], chunk * self.layout.chunk_bytes)
        return record


def read_into(fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Fill ``buffers`` with what lies in a row at ``offset``; beyond the file's end they stay as they are."""
    left = list(buffers)
    while left:
        count = os.preadv(fd, left, offset)
        if not count:
            return
        offset += count
        while left and count >= left[0].nbytes:
            count -= left.pop(0).nbytes
        if count:
            left[0] = left[0].cast("B")[count:]


def map_chunks(file: BinaryIO, layout: ChunkLayout, first: int = 0, most: int | None = None) -> NDArray[Any]:
    """Whole chunks of an open part file from ``first`` on, at most ``most``, mapped read-only as records [chunks]."""
    chunks = whole_chunks(file, layout) - first
    if most is not None:
        chunks = min(chunks, most)
    if chunks <= 0:
        return np.empty(0, layout.dtype)
    return np.memmap(file, dtype=layout.dtype, mode="r", offset=first * layout.chunk_bytes, shape=(chunks,))


def whole_chunks(file: BinaryIO, layout: ChunkLayout) -> int:
    """How many whole chunks an open part file has."""
    return os.fstat(file.fileno()).st_size // layout.chunk_bytes


def _bytes(rows: Array) -> NDArray[np.uint8]:
    """Rows as bytes [rows, row_bytes]."""
    return np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), -1)


def _write_whole(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written
