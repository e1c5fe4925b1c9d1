"""Turns the rows of one shard into its file in the spool, as they come.

::

    Activations (a batch) ─► prompt_{i} at its place in shard.part;  sums over its rows ─► shard, and its record
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamtap.activations import Activations
from streamtap.harvest.layout import ShardLayout
from streamtap.harvest.record import ShardRecord
from streamtap.harvest.sealing import shard_key, this_boot
from streamtap.harvested.manifest import ShardEntry, ShardTensor
from streamtap.harvested.shard_file import ShardFile
from streamtap.harvested.statistics import RowSums


class ShardWriting:
    """One shard on its way into ``folder``.

    Args:
        layout: The shard.
        folder: Where it is put together.
        left_out: Token ids whose rows the statistics leave out: BOS.
    """

    def __init__(self, layout: ShardLayout, folder: Path, left_out: NDArray[np.int32]) -> None:
        self._layout, self._left_out = layout, left_out
        self._path = folder / shard_key(layout.plan.number, "none")
        self._part = folder / f"{self._path.name}.part"
        self._file = ShardFile(self._part, layout.shapes())
        self._sums = RowSums.nothing(len(layout.layers), layout.width)
        for name, values in layout.numbers():
            self._file.put(name, [values])

    def add(self, part: Activations) -> None:
        """Write the rows of a batch."""
        layers = [part.acts[layer] for layer in self._layout.layers]
        for place, index in enumerate(part.index):
            start, stop = int(part.offsets[place]), int(part.offsets[place + 1])
            self._file.put(f"prompt_{self._layout.plan.first + int(index)}", [rows[start:stop] for rows in layers])
        counted = np.flatnonzero(~np.isin(part.token_ids, self._left_out))
        self._sums = self._sums.merged(RowSums.of(layers, counted))

    def finish(self) -> ShardRecord:
        """The record of the whole file, which is still to be sealed."""
        self._file.finish()
        self._part.replace(self._path)
        return self._record()

    def give_up(self) -> None:
        """Leave nothing behind."""
        self._file.close()
        self._part.unlink(missing_ok=True)

    def _record(self) -> ShardRecord:
        plan = self._layout.plan
        tensors = tuple(ShardTensor(name, shape) for name, (_, shape) in self._layout.shapes().items())
        entry = ShardEntry(
            key=shard_key(plan.number, self._layout.ask.compression),
            sha256="",
            bytes=self._file.size_bytes,
            prompt_indices=tuple(plan.indices),
            tensors=tensors,
            digest=plan.digest,
        )
        limits = self._layout.tokenizer_limits
        return ShardRecord(plan.number, entry, self._sums, _truncated(self._layout), plan.n_tokens, limits, this_boot())


def _truncated(layout: ShardLayout) -> tuple[dict[str, Any], ...]:
    pairs = zip(layout.plan.indices, layout.plan.prompts, strict=True)
    return tuple(
        {"index": index, "tokens": each.cut_from, "kept": len(each.token_ids)} for index, each in pairs if each.cut_from
    )
