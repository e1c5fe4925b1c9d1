"""``HarvestedRun``: a finished run, read by the prompt, wherever it lies.

::

    manifest.json ─► which shard holds prompt i ─► its header ─► only the bytes of the layers asked for
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from streamtap.activations import Activations, Provenance
from streamtap.errors import HarvestDamaged, InvalidInput, InvalidLayers
from streamtap.harvested.manifest import NAME, HarvestManifest, read_manifest
from streamtap.harvested.opening import open_place
from streamtap.harvested.places import Place, checked_name
from streamtap.harvested.segments import Segments
from streamtap.harvested.shard_reader import HarvestedShard, file_name
from streamtap.harvested.verify import verify_run
from streamtap.layers import LayerSpec, resolve_layers
from streamtap.ragged import offsets_of
from streamtap.tensor_file import read_tensors

Array = NDArray[Any]
Ints = NDArray[np.int32]

_MOMENTS = ("mean", "std")
#: Of a run that is not finished.
_BEGUN = "run.json"
#: What unpacked and fetched shards may take; the last one stays whatever it takes.
CACHE_BYTES = 1 << 30
#: A map of a file holds a file descriptor.
_MOST_SHARDS = 64
_DTYPES: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype("<f2"),
    "float32": np.dtype("<f4"),
}


class HarvestedRun:
    """A whole run; ``open`` makes one. Prompts are numbered as they were given, from 0. Several threads may read."""

    def __init__(self, place: Place, manifest: HarvestManifest, *, cache_bytes: int = CACHE_BYTES) -> None:
        """Of a manifest that was read already.

        Raises:
            HarvestDamaged: it contradicts itself.
        """
        self.place, self.manifest = place, manifest
        _check_readable(manifest, f"{place.url}/{NAME}")
        self._shelf: OrderedDict[int, HarvestedShard] = OrderedDict()
        self._cache_bytes = cache_bytes
        self._shelving = threading.Lock()
        self._shard_of = _shards_of_prompts(manifest, place.url)

    @classmethod
    def open(cls, where: str | Path | Place, *, cache_bytes: int = CACHE_BYTES) -> HarvestedRun:
        """The run in a folder, at an address of an object store, or at a ``Place``; only its manifest is read.

        Raises:
            HarvestDamaged: there is none, it is not finished, or its manifest is damaged.
            TransferFailed: the store fails.
        """
        place = open_place(where) if isinstance(where, str | Path) else where
        try:
            raw = place.get(NAME)
        except FileNotFoundError as error:
            raise _not_whole(place) from error
        return cls(place, read_manifest(raw, f"{place.url}/{NAME}"), cache_bytes=cache_bytes)

    def __repr__(self) -> str:
        held = f"{self.manifest.contents} of {self.manifest.n_prompts} prompts at layers {list(self.layers)}"
        return f"HarvestedRun({self.place.url!r}, {held})"

    def __len__(self) -> int:
        """Number of prompts."""
        return self.manifest.n_prompts

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers held, ascending."""
        return self.manifest.layer_indices

    @property
    def pooling(self) -> str:
        """The run's pooling; ``"none"`` where each token asked for has a row."""
        return str(self.manifest.capture.get("pooling", "none"))

    @property
    def width(self) -> int:
        """Of a row: hidden, or the number of directions."""
        return self.manifest.width

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the rows."""
        return _DTYPES[self.manifest.dtype]

    @cached_property
    def provenance(self) -> Provenance:
        """Where the rows came from."""
        manifest = self.manifest
        known = {field.name for field in fields(Provenance)}
        told = {name: value for name, value in manifest.provenance.items() if name in known}
        least = {"model": manifest.hf_repo, "commit": manifest.revision or "", "tokenizer": "", "dtype": manifest.dtype}
        return Provenance(**{**least, **told})

    def prompt(self, i: int, layers: LayerSpec | None = None) -> dict[int, Array]:
        """Rows of prompt ``i``, from the end where it is negative: ``{layer: [rows, width]}``.

        Rows in a file on this machine are read-only views of it.

        Raises:
            IndexError: there is no such prompt.
            InvalidLayers: a layer that the run does not hold.
            HarvestDamaged: the file is missing, or does not fit the manifest.
        """
        place = self._numbered(i)
        return self._shard_with(place).prompt(place, self.held_layers(layers))

    def token_ids(self, i: int) -> Ints:
        """Every token of prompt ``i`` as it ran, int32 [tokens]."""
        place = self._numbered(i)
        return self._shard_with(place).token_ids(place)

    def positions(self, i: int) -> Ints:
        """Where in prompt ``i`` its rows stand, int32 [rows]; -1 for a mean or a maximum."""
        place = self._numbered(i)
        return self._shard_with(place).positions(place)

    def segments(self, i: int) -> Segments | None:
        """Which documents window ``i`` is made of; None where it is no window of documents."""
        place = self._numbered(i)
        return self._shard_with(place).segments(place)

    def activations(
        self, indices: Sequence[int] | NDArray[np.integer[Any]] | None = None, layers: LayerSpec | None = None
    ) -> Activations:
        """Rows of the prompts at ``indices``, in that order, or of all; all that is asked for is held in memory.

        Negative places count from the end and a mask [prompts] picks, as in any array.

        Raises:
            IndexError: there is no such prompt.
            InvalidLayers: a layer that the run does not hold.
            HarvestDamaged: a file is missing, or does not fit the manifest.
        """
        everything = np.arange(len(self), dtype=np.int64)
        index = everything if indices is None else everything[np.asarray(indices) if len(indices) else slice(0)]
        return self._gathered(index, self.held_layers(layers))

    def shard(self, number: int) -> HarvestedShard:
        """One of the run's files; those read last are kept open."""
        with self._shelving:
            if number not in self._shelf:
                self._make_room()
                self._shelf[number] = HarvestedShard(self.place, self.manifest, number)
            self._shelf.move_to_end(number)
            return self._shelf[number]

    def shards(self) -> Iterator[HarvestedShard]:
        """All files, in order; only the one that is looked at is held."""
        for number in range(len(self.manifest.shards)):
            yield HarvestedShard(self.place, self.manifest, number)

    def statistics(self) -> dict[str, Array]:
        """``mean`` and ``std`` of all rows but those of BOS, float32 [layers, width]; ``layer_indices`` int32 [layers].

        Raises:
            HarvestDamaged: the file is missing or damaged.
        """
        name = str(self.manifest.statistics.get("file", "stats.safetensors"))
        try:
            found = read_tensors(self.place.get(name), name)[0]
        except (FileNotFoundError, InvalidInput) as error:
            raise HarvestDamaged(f"{name} of {self.place.url} is missing or damaged; harvest it again.") from error
        shape = (len(self.layers), self.width)
        if "layer_indices" not in found or any(name not in found or found[name].shape != shape for name in _MOMENTS):
            raise HarvestDamaged(f"{name} of {self.place.url} does not hold mean and std of {list(shape)}.")
        return found

    def held_layers(self, layers: LayerSpec | None) -> tuple[int, ...]:
        """The layers that a spec names, ascending; None and ``"all"`` are all that the run holds.

        Raises:
            InvalidLayers: the run does not hold them.
        """
        if layers is None or (isinstance(layers, str) and layers.strip() == "all"):
            return self.layers
        told = self.provenance.n_layers
        depth = max(told if isinstance(told, int) else 0, self.layers[-1] + 1)
        asked = resolve_layers(layers, depth)
        if absent := sorted(set(asked) - set(self.layers)):
            raise InvalidLayers(
                f"{self.place.url} holds layers {', '.join(map(str, self.layers))}; it has no layer "
                f"{', '.join(map(str, absent))}."
            )
        return asked

    def verify(self, advance: Callable[[int], None] | None = None) -> None:
        """Compare every file with its size, hash and header; ``advance`` is told of bytes read.

        Raises:
            HarvestDamaged: one is missing or differs; the first is named.
        """
        verify_run(self.place, self.manifest, advance)
        self.statistics()

    def _numbered(self, i: int) -> int:
        try:
            return range(len(self))[i]
        except IndexError:
            raise IndexError(f"{self.place.url} holds prompts 0 to {len(self) - 1}; there is no prompt {i}.") from None

    def _shard_with(self, i: int) -> HarvestedShard:
        return self.shard(int(self._shard_of[i]))

    def _make_room(self) -> None:
        while self._shelf and (
            len(self._shelf) >= _MOST_SHARDS
            or sum(shard.held_bytes for shard in self._shelf.values()) > self._cache_bytes
        ):
            self._shelf.popitem(last=False)

    def _gathered(self, index: NDArray[np.int64], layers: tuple[int, ...]) -> Activations:
        shards = self._shard_of[index]
        groups = [(number, np.flatnonzero(shards == number).tolist()) for number in np.unique(shards).tolist()]
        counts = np.zeros(len(index), np.int64)
        for number, places in groups:
            counts[places] = [self.shard(number).n_rows(int(index[place])) for place in places]
        offsets = offsets_of(counts)
        acts = {layer: np.empty((int(offsets[-1]), self.width), self.dtype) for layer in layers}
        token_ids, positions = (np.empty(int(offsets[-1]), np.int32) for _ in range(2))
        for number, places in groups:
            shard, prompts = self.shard(number), [int(index[place]) for place in places]
            for place, i, rows in zip(places, prompts, shard.rows(prompts, layers), strict=True):
                span = slice(int(offsets[place]), int(offsets[place + 1]))
                for layer in layers:
                    acts[layer][span] = rows[layer]
                positions[span] = shard.positions(i)
                token_ids[span] = _tokens_at(shard.token_ids(i), positions[span])
        return Activations(acts, offsets, token_ids, positions, self.provenance, self.pooling, index)


def _tokens_at(token_ids: Ints, positions: Ints) -> Ints:
    """The token that each row stands on, -1 where it stands on several."""
    if len(positions) and positions[0] < 0:
        return positions
    return token_ids[positions]


def _check_readable(manifest: HarvestManifest, where: str) -> None:
    for name, known in (("dtype", tuple(_DTYPES)), ("compression", ("none", "zstd"))):
        if getattr(manifest, name) not in known:
            raise HarvestDamaged(
                f"{where} names {name} {getattr(manifest, name)!r}; this version of Streamtap reads "
                f"{', '.join(known)}. Update it."
            )
    layers = manifest.layer_indices
    if not layers or any(one >= next_one for one, next_one in pairwise(layers)):
        raise HarvestDamaged(f"{where} names layers {list(layers)}, which do not ascend; harvest it again.")
    try:
        for entry in manifest.shards:
            checked_name(file_name(entry))
    except InvalidInput as error:
        raise HarvestDamaged(f"{where} is damaged: {error}") from error


def _shards_of_prompts(manifest: HarvestManifest, where: str) -> NDArray[np.int64]:
    """Number of the shard of each prompt [prompts]."""
    held = [np.array(entry.prompt_indices, np.int64) for entry in manifest.shards]
    indices = np.concatenate([np.zeros(0, np.int64), *held])
    order = np.argsort(indices, kind="stable")
    if not len(indices) or not np.array_equal(indices[order], np.arange(manifest.n_prompts)):
        raise HarvestDamaged(
            f"{where}/{NAME} names {len(indices)} prompts in its shards and {manifest.n_prompts} in all; each has "
            "to be in one shard. Harvest it again."
        )
    return np.repeat(np.arange(len(held)), [len(each) for each in held])[order]


def _not_whole(place: Place) -> HarvestDamaged:
    try:
        place.get(_BEGUN)
    except FileNotFoundError:
        return HarvestDamaged(f"{place.url} holds no harvest: there is no {NAME}. Name the folder of a run.")
    return HarvestDamaged(
        f"{place.url} holds a run that is not whole yet: its {NAME}, which is written last, is not there. Go on with "
        "the same command."
    )
