"""``HarvestedShard``: one file of a run, read by the prompt."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from streamtap.errors import HarvestDamaged, InvalidInput
from streamtap.harvested.file_bytes import FileBytes, Span, open_file
from streamtap.harvested.manifest import HarvestManifest, ShardEntry
from streamtap.harvested.places import Place
from streamtap.harvested.segments import Segments
from streamtap.pooling import ONE_TOKEN
from streamtap.tensor_file import LENGTH_BYTES, MOST_HEADER_BYTES, TensorPlace, header_bytes, parse_header

Array = NDArray[Any]
Ints = NDArray[np.int32]
T = TypeVar("T")

#: Most headers are shorter, so that one request brings them.
_HEAD_BYTES = 1 << 14
_WIDEST_ITEM_BYTES = 8


class _Once(Generic[T]):
    """A value that one thread makes when it is first wanted, while others wait."""

    def __init__(self) -> None:
        self._making = threading.Lock()
        self.made: T | None = None

    def get(self, make: Callable[[], T]) -> T:
        """The value; ``make`` is not kept, for a shard that held itself would not be freed at once."""
        with self._making:
            if self.made is None:
                self.made = make()
            return self.made


class HarvestedShard:
    """A shard of a run; nothing is read before it is asked for. Several threads may read.

    Prompts are named by their place in the whole list. Arrays of rows are read-only where they are views of the file.
    """

    def __init__(self, place: Place, manifest: HarvestManifest, number: int) -> None:
        self.number = number
        self._place, self._manifest = place, manifest
        self._entry: ShardEntry = manifest.shards[number]
        self._shapes: Mapping[str, tuple[int, ...]] = {tensor.name: tensor.shape for tensor in self._entry.tensors}
        self._file: _Once[FileBytes] = _Once()
        self._tensors: _Once[Mapping[str, TensorPlace]] = _Once()
        self._numbers: _Once[Mapping[str, Array]] = _Once()
        self._sides = len(manifest.layer_indices), manifest.width
        self._held = frozenset(self._entry.prompt_indices)

    @property
    def indices(self) -> tuple[int, ...]:
        """The prompts that it holds, by their places in the whole list."""
        return self._entry.prompt_indices

    @property
    def held_bytes(self) -> int:
        """Memory that its file takes; a map of a file on disk takes none."""
        return self._file.made.held_bytes if self._file.made else 0

    def __len__(self) -> int:
        """Number of its prompts."""
        return len(self._entry.prompt_indices)

    def n_rows(self, i: int) -> int:
        """Rows of prompt ``i`` in each layer, by the manifest; nothing is read.

        Raises:
            IndexError: the shard does not hold it.
            HarvestDamaged: the manifest does not say it.
        """
        self._check_held(i)
        return self._shape(f"prompt_{i}")[1]

    def prompt(self, i: int, layers: Sequence[int] | None = None) -> dict[int, Array]:
        """Rows of prompt ``i``, ``{layer: [rows, width]}``, of the layers asked for or all.

        Raises:
            IndexError: the shard does not hold it.
            HarvestDamaged: the file is missing or does not fit the manifest.
        """
        return self.rows([i], layers)[0]

    def rows(self, prompts: Sequence[int], layers: Sequence[int] | None = None) -> list[dict[int, Array]]:
        """As ``prompt``, of several, with as few reads as they need."""
        asked = self._manifest.layer_indices if layers is None else tuple(layers)
        places = [self._tensor(f"prompt_{i}") for i in prompts if self._check_held(i)]
        found = iter(self._bytes().spans(self.spans(prompts, asked)))
        return [{layer: _array(next(found), place.dtype, place.shape[1:]) for layer in asked} for place in places]

    def spans(self, prompts: Sequence[int], layers: Sequence[int]) -> list[Span]:
        """Where these rows lie in the file once it is unpacked: of each prompt, one span a layer."""
        at = [self._manifest.layer_indices.index(layer) for layer in layers]
        places = [self._tensor(f"prompt_{i}") for i in prompts if self._check_held(i)]
        return [span for place in places for span in _layer_spans(place, at)]

    def token_ids(self, i: int) -> Ints:
        """Every token of prompt ``i`` as it ran, int32 [tokens]."""
        self._check_held(i)
        return self._number(f"tokens_{i}")

    def positions(self, i: int) -> Ints:
        """Where in prompt ``i`` its rows stand, int32 [rows]; -1 for a mean or a maximum."""
        n_rows = self.n_rows(i)
        if self._pooling not in ("none", *ONE_TOKEN):
            return np.full(n_rows, -1, np.int32)
        if f"positions_{i}" in self._shapes:
            return self._number(f"positions_{i}")
        if n_rows != len(self.token_ids(i)):
            raise self._damaged(f"prompt {i} has {n_rows} rows of {len(self.token_ids(i))} tokens, and not said which")
        return np.arange(n_rows, dtype=np.int32)

    def segments(self, i: int) -> Segments | None:
        """Which documents prompt ``i`` is made of; None where it is no window of documents."""
        self._check_held(i)
        if f"documents_{i}" not in self._shapes:
            return None
        return Segments(self._number(f"documents_{i}"), self._number(f"offsets_{i}"), self._number(f"starts_{i}"))

    def check(self) -> None:
        """Compare the file's header with the manifest.

        Raises:
            HarvestDamaged: they differ.
        """
        for name in self._shapes:
            self._tensor(name)

    @property
    def _pooling(self) -> str:
        return str(self._manifest.capture.get("pooling", "none"))

    def _bytes(self) -> FileBytes:
        return self._file.get(self._opened)

    def _opened(self) -> FileBytes:
        tensors = sum(math.prod(shape) * _WIDEST_ITEM_BYTES for shape in self._shapes.values())
        name = file_name(self._entry)
        packed = self._manifest.compression == "zstd"
        most = MOST_HEADER_BYTES + tensors
        return open_file(self._place, name, self._entry.bytes, packed=packed, most_bytes=most)

    def _read_header(self) -> Mapping[str, TensorPlace]:
        where, file = f"{file_name(self._entry)} of {self._place.url}", self._bytes()
        head = bytes(file.spans([(0, min(_HEAD_BYTES, file.size_bytes))])[0])
        try:
            stop = LENGTH_BYTES + header_bytes(head[:LENGTH_BYTES], where)
            if stop > len(head):
                head = bytes(file.spans([(0, stop)])[0])
            tensors = parse_header(head[LENGTH_BYTES:stop], where)[0]
        except InvalidInput as error:
            raise HarvestDamaged(str(error)) from error
        if any(tensor.stop > file.size_bytes for tensor in tensors.values()):
            raise self._damaged("its header names more than it holds")
        return tensors

    def _check_held(self, i: int) -> bool:
        if i not in self._held:
            raise IndexError(f"shard {self.number} does not hold prompt {i}.")
        return True

    def _shape(self, name: str) -> tuple[int, ...]:
        shape = self._shapes.get(name)
        if shape is None:
            raise self._damaged(f"the manifest tells no shape of {name}")
        if name.startswith("prompt_") and (len(shape) != 3 or (shape[0], shape[2]) != self._sides):
            layers, width = self._sides
            raise self._damaged(f"{name} is {list(shape)} by the manifest, and has to be [{layers}, rows, {width}]")
        return shape

    def _tensor(self, name: str) -> TensorPlace:
        found, shape = self._tensors.get(self._read_header).get(name), self._shape(name)
        if found is None or found.shape != shape:
            there = "is not there" if found is None else f"is {list(found.shape)} there"
            raise self._damaged(f"{name} {there}, and the manifest says {list(shape)}")
        if name.startswith("prompt_") and found.dtype.name != self._manifest.dtype:
            raise self._damaged(f"{name} is {found.dtype.name}, and the manifest says {self._manifest.dtype}")
        return found

    def _read_numbers(self) -> Mapping[str, Array]:
        """All that is no row, read at once: it is little, and lies in one place."""
        places = {name: self._tensor(name) for name in self._shapes if not name.startswith("prompt_")}
        found = self._bytes().spans([(place.start, place.stop) for place in places.values()])
        pairs = zip(places.items(), found, strict=True)
        # Copies: rows of two bytes may have put them at an odd place, and a view would hold the whole file.
        return {name: np.array(np.frombuffer(raw, place.dtype)).reshape(place.shape) for (name, place), raw in pairs}

    def _number(self, name: str) -> Array:
        try:
            return self._numbers.get(self._read_numbers)[name]
        except KeyError:
            raise self._damaged(f"the manifest names no {name}") from None

    def _damaged(self, what: str) -> HarvestDamaged:
        return HarvestDamaged(f"{file_name(self._entry)} of {self._place.url} is damaged: {what}.")


def file_name(entry: ShardEntry) -> str:
    """Name of the shard's file in its folder; others write the key with the folders before it."""
    return entry.key.rpartition("/")[2]


def _layer_spans(place: TensorPlace, at: Sequence[int]) -> list[Span]:
    """Where the layers ``at`` of a tensor [layers, rows, width] lie."""
    size = (place.stop - place.start) // max(1, place.shape[0])
    return [(place.start + size * layer, place.start + size * (layer + 1)) for layer in at]


def _array(raw: memoryview, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    return np.frombuffer(raw, dtype).reshape(shape)
