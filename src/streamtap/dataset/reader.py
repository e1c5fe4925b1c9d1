"""Rows out of a dataset: whole shards of the layers asked for, or only the rows' bytes where few are wanted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamtap.dataset.checked import CheckedFiles
from streamtap.dataset.index import Footer, IndexFile, Places, read_footer
from streamtap.dataset.manifest import Hidden, Logits, Manifest
from streamtap.dataset.names import INDEX, LOGIT_IDS, LOGIT_VALUES, hidden_key
from streamtap.dataset.places import Advance, Source, no_advance
from streamtap.dataset.shards import Tensor, header_bytes, parse_header, read_header, read_into
from streamtap.errors import DatasetDamaged, NotInDataset
from streamtap.tensor_file import LENGTH_BYTES

Array = NDArray[Any]
Ints = NDArray[np.int64]

# Below this a file is fetched whole: one request costs more than the bytes.
_SMALL_BYTES = 1 << 20
# Rows closer than this are fetched together.
_GAP_BYTES = 1 << 16
_MOST_RANGES = 256
# Rows are fetched alone where they are at most one in so many of the file's bytes.
_SHARE = 4
# Headers of our files, and of others, are far shorter.
_HEAD_BYTES = 1 << 12


@dataclass(frozen=True)
class Dataset:
    """A dataset to read, wherever it lies; ``checked`` remembers which files were compared with their hashes."""

    source: Source
    checked: CheckedFiles
    advance: Advance = field(default=no_advance)

    @cached_property
    def index(self) -> IndexFile:
        """The index, fetched whole."""
        return IndexFile(self.source.fetch(INDEX), self.source)

    @cached_property
    def footer(self) -> Footer:
        """What the end of the index says, without fetching the rest."""
        return read_footer(self.source)

    @property
    def manifest(self) -> Manifest:
        """The dataset's manifest."""
        return self.index.manifest

    @property
    def hidden(self) -> Hidden:
        """What it holds of activations.

        Raises:
            NotInDataset: none.
        """
        if self.manifest.hidden is None:
            raise NotInDataset(f"{self.source.name} holds no activations.")
        return self.manifest.hidden

    @property
    def logits(self) -> Logits:
        """What it holds of logits.

        Raises:
            NotInDataset: none.
        """
        if self.manifest.logits is None or not self.manifest.logits.shards:
            raise NotInDataset(f"{self.source.name} holds no logits.")
        return self.manifest.logits

    def layers(self, asked: Sequence[int] | None) -> tuple[int, ...]:
        """The layers asked for, by default all, ascending; negative ones are refused, since the depth is unknown.

        Raises:
            NotInDataset: a layer that the dataset does not hold; all that it holds are named.
        """
        held = self.hidden.layers
        if asked is None:
            return tuple(sorted(held))
        if absent := sorted(set(asked) - set(held)):
            raise NotInDataset(
                f"{self.source.name} holds layers {_short(held)}; it has no layer {', '.join(map(str, absent))}."
            )
        return tuple(sorted(set(asked)))

    def read_layer(self, layer: int, places: Places, dtype: np.dtype[Any] | None = None) -> Array:
        """Rows of a layer [rows, hidden], in the order of ``places``; ``dtype`` None keeps the stored one.

        Raises:
            DatasetDamaged: a file does not fit the index or its hash, also when fetched again.
        """
        hidden = self.hidden
        return self._gather(places, hidden, lambda shard: hidden.file(layer, shard), hidden_key(layer), dtype)

    def read_logits(self, places: Places) -> tuple[Array, Array]:
        """Values float32 [rows, k] and token ids int32 [rows, k].

        Raises:
            DatasetDamaged: as ``read_layer``.
        """
        logits = self.logits
        values = self._gather(places, logits, logits.file, LOGIT_VALUES, np.float32)
        return values, self._gather(places, logits, logits.file, LOGIT_IDS, np.int32)

    def whole(self, path: str) -> Path:
        """A file on this machine that has its hash; fetched a second time where the first had not.

        Raises:
            DatasetDamaged: twice another content than the manifest says.
        """
        file = self.source.fetch(path, advance=self.advance)
        expected = self.manifest.files.get(path)
        if expected is None or self.checked.is_whole(file, expected):
            return file
        file = self.source.fetch(path, again=True, advance=self.advance)
        if self.checked.is_whole(file, expected):
            return file
        raise DatasetDamaged(
            f"{path} of {self.source.name} is not the file that its manifest describes: "
            f"{file.stat().st_size} bytes, or another hash, where {expected.size_bytes} bytes were published. "
            "It was fetched twice; ask its owner to publish it again."
        )

    def _gather(
        self, places: Places, kind: Hidden | Logits, file_of: Callable[[int], str], key: str, dtype: Any
    ) -> Array:
        width = kind.width
        out: Array | None = None if dtype is None else np.empty((len(places), width), dtype)
        for shard in np.unique(places.shards).tolist():
            at = np.flatnonzero(places.shards == shard)
            if not 0 <= shard < len(kind.shards):
                raise DatasetDamaged(f"the index of {self.source.name} names shard {shard} of {len(kind.shards)}.")
            found = self._find(file_of(shard), key, places.rows[at], width, kind.file_bytes(shard))
            if out is None:
                out = np.empty((len(places), width), found.dtype)
            if len(at) == int(at[-1]) - int(at[0]) + 1:
                found.copy_to(out[int(at[0]) : int(at[-1]) + 1])
            else:
                piece = np.empty((len(at), width), found.dtype)
                found.copy_to(piece)
                out[at] = piece
        return np.empty((0, width), np.float32) if out is None else out

    def _find(self, path: str, key: str, rows: Ints, width: int, file_bytes: int) -> _Rows:
        if file_bytes >= _SMALL_BYTES and self.source.on_disk(path) is None:
            few = self._few(path, key, rows, width, file_bytes)
            if few is not None:
                return few
        file = self.whole(path)
        tensor = self._tensor(read_header(file, path), key, path, rows, width)
        return _Rows(tensor.dtype, lambda out: read_into(file, tensor, rows, out))

    def _few(self, path: str, key: str, rows: Ints, width: int, file_bytes: int) -> _Rows | None:
        """The rows by their bytes alone, or None where the whole file is the better buy."""
        runs = _runs(np.unique(rows), max(1, _GAP_BYTES // (width * 4)))
        wanted = sum(stop - start for start, stop in runs)
        if wanted * width * 2 * _SHARE > file_bytes:
            return None
        tensor = self._tensor(self._remote_header(path), key, path, rows, width)
        if not is_read_in_part(wanted * tensor.row_bytes, file_bytes):
            return None
        values = np.concatenate([self._range(path, tensor, start, stop) for start, stop in runs])
        numbers = np.concatenate([np.arange(start, stop) for start, stop in runs])
        picked = values[np.searchsorted(numbers, rows)]

        def copy(out: Array) -> None:
            out[:] = picked

        return _Rows(tensor.dtype, copy)

    def _range(self, path: str, tensor: Tensor, start: int, stop: int) -> Array:
        first, last = tensor.start + start * tensor.row_bytes, tensor.start + stop * tensor.row_bytes
        data = self.source.read_range(path, first, last)
        self.advance(len(data))
        if len(data) != last - first:
            raise DatasetDamaged(f"{path} of {self.source.name} ends before its rows do.")
        return np.frombuffer(data, tensor.dtype).reshape(-1, tensor.width)

    def _remote_header(self, path: str) -> dict[str, Tensor]:
        head = self.source.read_range(path, 0, _HEAD_BYTES)
        length = header_bytes(head[:LENGTH_BYTES], path)
        if length > len(head) - LENGTH_BYTES:
            head += self.source.read_range(path, len(head), LENGTH_BYTES + length)
        return parse_header(head[LENGTH_BYTES : LENGTH_BYTES + length], path)

    def _tensor(self, tensors: dict[str, Tensor], key: str, path: str, rows: Ints, width: int) -> Tensor:
        tensor = tensors.get(key)
        if tensor is None:
            raise DatasetDamaged(f"{path} of {self.source.name} holds no tensor {key}.")
        if tensor.width != width or (len(rows) and (rows.min() < 0 or rows.max() >= tensor.rows)):
            raise DatasetDamaged(
                f"tensor {key} in {path} of {self.source.name} is [{tensor.rows}, {tensor.width}], "
                f"and its index asks for row {_odd_row(rows)} of width {width}."
            )
        return tensor


def is_read_in_part(part_bytes: int, file_bytes: int) -> bool:
    """Whether so many bytes of a remote file are fetched without the rest of it."""
    return file_bytes >= _SMALL_BYTES and part_bytes * _SHARE <= file_bytes


@dataclass(frozen=True)
class _Rows:
    """Rows of one file in their stored dtype; ``copy_to`` fills an array [rows, width] of any dtype."""

    dtype: np.dtype[Any]
    copy_to: Callable[[Array], None]


def _runs(rows: Ints, gap: int) -> list[tuple[int, int]]:
    """Ascending row numbers as stretches [start, stop), those that lie close together in one.

    They are no more than a server may be asked for: then the widest gaps are left between them.
    """
    if not len(rows):
        return []
    gaps = np.diff(rows)
    breaks = np.flatnonzero(gaps > gap)
    if len(breaks) >= _MOST_RANGES:
        breaks = np.sort(np.argsort(gaps, kind="stable")[-(_MOST_RANGES - 1) :]) if _MOST_RANGES > 1 else breaks[:0]
    starts = [int(rows[0]), *rows[breaks + 1].tolist()]
    stops = [*(rows[breaks] + 1).tolist(), int(rows[-1]) + 1]
    return list(zip(starts, stops, strict=True))


def _odd_row(rows: Ints) -> int:
    """A row that is not there, or the last one."""
    return int(rows.min()) if len(rows) and rows.min() < 0 else int(rows.max(initial=0))


def _short(layers: Sequence[int]) -> str:
    ordered = sorted(layers)
    return f"{ordered[0]} to {ordered[-1]}" if ordered == list(range(ordered[0], ordered[-1] + 1)) else str(ordered)
