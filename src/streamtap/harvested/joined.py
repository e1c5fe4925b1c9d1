"""``JoinedRuns``: several runs, whose prompts follow on each other, read as one.

A harvest of more prompts than one job may have is several runs; here prompt i is the i-th of all. To have them as one
run, whose files say so, ``joining.fetch_joined`` brings them to a folder.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamtap.activations import Activations, Provenance, join
from streamtap.errors import HarvestMismatch, InvalidInput
from streamtap.harvested.manifest import HarvestManifest
from streamtap.harvested.reader import HarvestedRun
from streamtap.harvested.segments import Segments
from streamtap.harvested.statistics import RowSums
from streamtap.layers import LayerSpec

Array = NDArray[Any]
Ints = NDArray[np.int32]

#: What the manifests of parts must share to be one.
_SAME = (
    *("model_id", "revision", "dtype", "contents", "projection", "capture", "add_special_tokens", "layer_indices"),
    "provenance",
)
#: What says where a model ran, not which it is.
_ELSEWHERE = ("device", "engine_version")


class JoinedRuns:
    """``runs``, in order, as one ``HarvestedRun``: the same questions, with prompts numbered over all of them.

    Raises:
        HarvestMismatch: they are not of one model, or do not keep the same of each prompt.
    """

    def __init__(self, runs: Sequence[HarvestedRun]) -> None:
        if not runs:
            raise InvalidInput("JoinedRuns needs at least one run; got none.")
        self.runs = tuple(runs)
        #: The number of each run's first prompt, and how many there are in all.
        self.firsts = (0, *accumulate(len(run) for run in runs))
        for run in runs[1:]:
            _check_alike(runs[0], run)

    def __len__(self) -> int:
        """Number of prompts."""
        return self.firsts[-1]

    @property
    def manifests(self) -> tuple[HarvestManifest, ...]:
        """Of each run, in order."""
        return tuple(run.manifest for run in self.runs)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers held, ascending."""
        return self.runs[0].layers

    @property
    def pooling(self) -> str:
        """Of all runs."""
        return self.runs[0].pooling

    @property
    def width(self) -> int:
        """Of a row: hidden, or the number of directions."""
        return self.runs[0].width

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the rows."""
        return self.runs[0].dtype

    @property
    def provenance(self) -> Provenance:
        """Where the rows of the first run came from; those of the others may have run on another device."""
        return self.runs[0].provenance

    def prompt(self, i: int, layers: LayerSpec | None = None) -> dict[int, Array]:
        """See ``HarvestedRun.prompt``."""
        run, own = self._at(i)
        return run.prompt(own, layers)

    def token_ids(self, i: int) -> Ints:
        """See ``HarvestedRun.token_ids``."""
        run, own = self._at(i)
        return run.token_ids(own)

    def positions(self, i: int) -> Ints:
        """See ``HarvestedRun.positions``."""
        run, own = self._at(i)
        return run.positions(own)

    def segments(self, i: int) -> Segments | None:
        """See ``HarvestedRun.segments``."""
        run, own = self._at(i)
        return run.segments(own)

    def activations(
        self, indices: Sequence[int] | NDArray[np.integer[Any]] | None = None, layers: LayerSpec | None = None
    ) -> Activations:
        """See ``HarvestedRun.activations``."""
        everything = np.arange(len(self), dtype=np.int64)
        index = everything if indices is None else everything[np.asarray(indices, np.int64)]
        owners = np.searchsorted(self.firsts, index, side="right") - 1
        asked = np.unique(owners).tolist() or [0]
        parts = [
            self._shifted(number, self.runs[number].activations(index[owners == number] - self.firsts[number], layers))
            for number in asked
        ]
        if len(parts) == 1:
            return parts[0]
        # Grouped by run; the place of each in what was asked for.
        order = np.concatenate([np.flatnonzero(owners == number) for number in asked])
        return join(parts).select(np.argsort(order, kind="stable"))

    def statistics(self) -> dict[str, Array]:
        """See ``HarvestedRun.statistics``; merged from those of the runs, in their order."""
        sums = RowSums.nothing(len(self.layers), self.width)
        for run in self.runs:
            sums = sums.merged(_sums(run))
        indices = np.array(self.layers, np.int32)
        return {
            "mean": sums.mean.astype(np.float32),
            "std": sums.std.astype(np.float32),
            "layer_indices": indices,
        }

    def verify(self, advance: Callable[[int], None] | None = None) -> None:
        """See ``HarvestedRun.verify``."""
        for run in self.runs:
            run.verify(advance)

    def _at(self, i: int) -> tuple[HarvestedRun, int]:
        place = range(len(self))[i]
        number = bisect_right(self.firsts, place) - 1
        return self.runs[number], place - self.firsts[number]

    def _shifted(self, number: int, part: Activations) -> Activations:
        return replace(part, index=part.index + self.firsts[number], provenance=self.provenance)


def _check_alike(first: HarvestedRun, other: HarvestedRun) -> None:
    for name in _SAME:
        one, two = (_shared(getattr(run.manifest, name)) for run in (first, other))
        if one != two:
            raise HarvestMismatch(
                f"{first.place.url} and {other.place.url} are not parts of one harvest: {name} differs."
            )


def _shared(value: Any) -> Any:
    return {key: each for key, each in value.items() if key not in _ELSEWHERE} if isinstance(value, dict) else value


def _sums(run: HarvestedRun) -> RowSums:
    found = run.statistics()
    count = int(run.manifest.statistics["count"])
    std = found["std"].astype(np.float64)
    norms = np.array(run.manifest.mean_token_norm, np.float64) * count
    return RowSums(count, found["mean"].astype(np.float64), std**2 * count, norms)
