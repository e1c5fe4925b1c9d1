"""The rows of a harvest as what they are: a model's own, under which identity, and if not, why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamtap.activations import Activations, Provenance
from streamtap.cache.layout import stored_dtype
from streamtap.errors import InvalidInput
from streamtap.harvested.joined import JoinedRuns
from streamtap.harvested.manifest import HarvestManifest
from streamtap.harvested.reader import HarvestedRun
from streamtap.layers import LayerSpec
from streamtap.pooling import check_pooling
from streamtap.ragged import blocks
from streamtap.spec import CaptureSpec
from streamtap.workbench.wanted import row_identity

Ints = NDArray[np.int64]
#: A harvest that is one run, or the several of one.
Harvest = HarvestedRun | JoinedRuns

_BLOCK_BYTES = 32 << 20
_LIMITS = {"context_length", "vocabulary", "special_ids"}
#: Dtypes of files that hold every value of a model's dtype.
_WIDE_ENOUGH = {"bfloat16": ("bfloat16", "float32"), "float16": ("float32",), "float32": ("float32",)}


def open_harvest(harvest: Harvest | str | Path) -> Harvest:
    """The harvest that is given, or the one in a folder or at an address.

    Raises:
        HarvestDamaged: there is none, or it is not whole.
    """
    return HarvestedRun.open(harvest) if isinstance(harvest, str | Path) else harvest


@dataclass(frozen=True)
class HarvestedRows:
    """Whole rows, or what was pooled of them.

    Raises:
        InvalidInput: ``harvest`` holds products with directions.
    """

    harvest: Harvest

    def __post_init__(self) -> None:
        """Look at what it holds."""
        if self._manifest.contents != "activations":
            raise InvalidInput(
                f"{self.name} holds products of rows with directions, and only rows can go on from here; harvest "
                "without a projection."
            )

    @property
    def name(self) -> str:
        """Where it lies, for messages."""
        runs = self._runs
        return runs[0].place.url + (f" and {len(runs) - 1} more" if len(runs) > 1 else "")

    @property
    def provenance(self) -> Provenance:
        """Where the rows come from."""
        return self.harvest.provenance

    @property
    def limits(self) -> Mapping[str, Any]:
        """What tokenising depended on beside the tokenizer's files; empty where it was not told."""
        return self._manifest.tokenizer_limits

    @property
    def add_special_tokens(self) -> bool:
        """Whether texts got a BOS and the like."""
        return self._manifest.add_special_tokens

    @cached_property
    def spec(self) -> CaptureSpec:
        """How the rows were taken."""
        said = self._manifest.capture
        return CaptureSpec(
            layers=(), positions=said.get("positions", "all"), pooling=check_pooling(str(said.get("pooling", "none")))
        )

    @property
    def is_rounded(self) -> bool:
        """Whether the files hold less than the model gave."""
        return self._manifest.dtype not in _WIDE_ENOUGH.get(self.provenance.dtype, ())

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the rows as they are handed on: the model's own, where the files hold all of it."""
        return stored_dtype(self._manifest.dtype if self.is_rounded else self.provenance.dtype)

    @property
    def identity(self) -> dict[str, Any]:
        """That of the rows; rounded ones have one of their own."""
        mine = row_identity(self.provenance, self.spec)
        return {**mine, "rounded_to": self._manifest.dtype} if self.is_rounded else mine

    @property
    def lacks(self) -> str | None:
        """Why the rows are not those that the model itself would be asked for, None where they are."""
        about = self.provenance
        if not about.commit:
            return "it does not say which commit of the model made its rows"
        if not about.tokenizer or not set(self.limits) >= _LIMITS:
            return "it does not say how its texts became tokens"
        if self.is_rounded:
            return (
                f"its rows are {self._manifest.dtype}, rounded from the model's {about.dtype}; harvest with dtype "
                "'float32', or 'bfloat16' where the model is"
            )
        return None

    def layers(self, asked: LayerSpec | None) -> tuple[int, ...]:
        """The layers asked for, or all that there are, ascending.

        Raises:
            InvalidLayers: some are not there.
        """
        return self._runs[0].held_layers(asked)

    @cached_property
    def counts(self) -> Ints:
        """Rows of each prompt, int64 [prompts]."""
        counts, first = np.zeros(len(self.harvest), np.int64), 0
        for run in self._runs:
            for shard in run.shards():
                places = first + np.asarray(shard.indices, np.int64)
                counts[places] = [shard.n_rows(i) for i in shard.indices]
            first += len(run)
        return counts

    def token_ids(self, start: int, stop: int) -> list[NDArray[np.int32]]:
        """Every token of prompts [start, stop)."""
        return [self.harvest.token_ids(i) for i in range(start, stop)]

    def read(self, prompts: Sequence[int], layers: Sequence[int]) -> Activations:
        """The rows of some prompts, in the model's dtype where the files hold all of it."""
        found = self.harvest.activations(prompts, list(layers))
        return replace(found, acts={k: rows.astype(self.dtype, copy=False) for k, rows in found.acts.items()})

    def blocks(self, prompts: Sequence[int], layers: Sequence[int]) -> Iterator[Activations]:
        """``read`` of all ``prompts``, some at a time, so that memory does not grow with them."""
        if not len(prompts):
            return
        row_bytes = self.harvest.width * self.dtype.itemsize * len(layers)
        for start, stop in blocks(self.counts[np.asarray(prompts)], max(1, _BLOCK_BYTES // row_bytes)):
            yield self.read(prompts[start:stop], layers)

    @property
    def _runs(self) -> tuple[HarvestedRun, ...]:
        return self.harvest.runs if isinstance(self.harvest, JoinedRuns) else (self.harvest,)

    @property
    def _manifest(self) -> HarvestManifest:
        return self._runs[0].manifest
