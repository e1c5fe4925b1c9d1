"""Adding rows: bytes first, then one transaction that makes them part of the cache."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from streamtap.cache.entries import add_entries, missing
from streamtap.cache.index import Index
from streamtap.cache.layout import Channel, stored_dtype
from streamtap.cache.parts import HeldPart, take_part
from streamtap.cache.prompts import add_prompts, check_digests
from streamtap.cache.values import PromptKey
from streamtap.errors import InvalidInput, NotEnoughSpace
from streamtap.ragged import offsets_of

Array = NDArray[Any]
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Batch:
    """Rows of several prompts; see ``PartWriter.append`` for the shapes."""

    keys: Sequence[PromptKey]
    rows: Mapping[str, Array]
    offsets: NDArray[np.int64]
    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32]

    def pick(self, places: Sequence[int], channels: Sequence[str]) -> Batch:
        """Some prompts and some channels of it, densely."""
        counts = np.diff(self.offsets)[places]
        offsets = offsets_of(counts)
        keys = [self.keys[place] for place in places]
        if len(places) == len(self.keys):
            rows = {name: self.rows[name] for name in channels}
            return Batch(keys, rows, offsets, self.token_ids, self.positions)
        take = np.repeat(self.offsets[:-1][places] - offsets[:-1], counts) + np.arange(offsets[-1])
        rows = {name: self.rows[name][take] for name in channels}
        return Batch(keys, rows, offsets, self.token_ids[take], self.positions[take])


class PartWriter:
    """Writes to parts that it holds for itself until it is closed; made by ``CacheStore.writer``."""

    def __init__(self, index: Index, root: Path, set_id: int, channels: Sequence[Channel], part_bytes: int) -> None:
        self._index = index
        self._root = root
        self._set_id = set_id
        self._channels = {channel.name: channel for channel in channels}
        self._part_bytes = part_bytes
        self._parts: dict[tuple[str, ...], HeldPart] = {}
        self._lock = threading.Lock()
        self._part(tuple(self._channels))

    def __enter__(self) -> Self:
        """Enter the block at whose end the parts are released."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release the parts."""
        self.close()

    def close(self) -> None:
        """Release the parts for other writers; may be called twice."""
        with self._lock:
            self._release()

    def _release(self) -> None:
        while self._parts:
            self._parts.popitem()[1].release()

    def append(
        self,
        keys: Sequence[PromptKey],
        rows: Mapping[str, Array],
        offsets: NDArray[np.int64],
        token_ids: NDArray[np.int32],
        positions: NDArray[np.int32],
    ) -> None:
        """Add a batch; when this returns it is durable, when it raises none of it is in the cache.

        What the set holds already is not written twice.

        Args:
            keys: One a prompt.
            rows: ``{channel: [rows, width]}``, every channel of this writer in its dtype.
            offsets: int64 [prompts + 1]; prompt i owns rows ``offsets[i]:offsets[i + 1]``.
            token_ids: int32 [rows], the token each row stands on, or -1.
            positions: int32 [rows], its place in the prompt, or -1.

        Raises:
            InvalidInput: shapes, dtypes or channels that do not fit.
            NotEnoughSpace: the disk is full.
            CacheBusy: others held the index for too long.
        """
        batch = Batch(keys, rows, np.asarray(offsets, np.int64), token_ids, positions)
        _check(batch, self._channels)
        with self._lock, _disk_errors(self._root):
            self._append(batch)

    def _append(self, batch: Batch) -> None:
        written = []
        for channels, places in self._lacking(batch).items():
            picked = batch.pick(places, channels)
            part = self._part(channels)
            part.file.write(part.next_row, picked.rows, picked.token_ids, picked.positions)
            written.append((part, picked))
        if not written:
            return
        try:
            self._commit(written)
        except BaseException:
            # Whether it was committed is not known here, so the next batch reads anew where rows are free.
            self._release()
            raise

    def _lacking(self, batch: Batch) -> dict[tuple[str, ...], list[int]]:
        """The channels to write, each with the places of its prompts; equal prompts of a batch count once."""
        digests = [key.digest for key in batch.keys]
        with self._index.reading() as db:
            groups = missing(db, self._set_id, digests, list(self._channels))
        first = {digest: place for place, digest in reversed(list(enumerate(digests)))}
        once = set(first.values())
        return {channels: [place for place in places if place in once] for channels, places in groups.items()}

    def _commit(self, written: Sequence[tuple[HeldPart, Batch]]) -> None:
        moved = []
        with self._index.writing() as db:
            for part, batch in written:
                add_prompts(db, batch.keys)
                names = [channel.name for channel in part.file.layout.channels]
                # Another process may have been quicker since we looked.
                lacking = missing(db, self._set_id, [key.digest for key in batch.keys], names)
                places = sorted(place for some in lacking.values() for place in some)
                next_row = part.next_row + int(batch.offsets[-1])
                add_entries(db, self._set_id, part.id, _entries(batch, places, part.next_row), next_row)
                moved.append((part, next_row))
        for part, next_row in moved:
            part.next_row = next_row

    def _part(self, channels: tuple[str, ...]) -> HeldPart:
        """The part held for these channels, a new one where it is full."""
        part = self._parts.get(channels)
        if part and part.bytes >= self._part_bytes:
            with self._index.writing() as db:
                db.execute("UPDATE parts SET state = 'full' WHERE id = ?", (part.id,))
            self._parts.pop(channels).release()
            part = None
        if part is None:
            wanted = [self._channels[name] for name in channels]
            part = self._parts[channels] = take_part(self._index, self._root, self._set_id, wanted)
        return part


def _entries(batch: Batch, places: Sequence[int], first_row: int) -> Iterator[tuple[bytes, int, int]]:
    for place in places:
        start, stop = int(batch.offsets[place]), int(batch.offsets[place + 1])
        yield batch.keys[place].digest, first_row + start, stop - start


def _check(batch: Batch, channels: Mapping[str, Channel]) -> None:
    check_digests([key.digest for key in batch.keys], "the keys' digests")
    n_rows = len(batch.token_ids)
    offsets = batch.offsets
    if len(offsets) != len(batch.keys) + 1 or offsets[0] != 0 or offsets[-1] != n_rows or np.any(np.diff(offsets) < 0):
        raise InvalidInput(
            f"offsets must rise from 0 to the {n_rows} rows, one more than the {len(batch.keys)} prompts; "
            f"got {len(offsets)} of them."
        )
    for name, column in (("token_ids", batch.token_ids), ("positions", batch.positions)):
        if column.dtype != np.int32 or column.shape != (n_rows,):
            raise InvalidInput(f"{name} must be int32 [{n_rows}]; got {column.dtype} {list(column.shape)}.")
    if set(batch.rows) != set(channels):
        raise InvalidInput(f"this writer takes channels {sorted(channels)}; got {sorted(batch.rows)}.")
    for name, channel in channels.items():
        values = batch.rows[name]
        if values.dtype != stored_dtype(channel.dtype) or values.shape != (n_rows, channel.width):
            raise InvalidInput(
                f"channel {name!r} must be {channel.dtype} [{n_rows}, {channel.width}]; "
                f"got {values.dtype} {list(values.shape)}."
            )


@contextmanager
def _disk_errors(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _FULL_DISK:
            raise NotEnoughSpace(f"the disk of {root} is full; the batch was not added to the cache.") from error
        raise
