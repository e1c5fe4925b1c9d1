"""Read rows out of the cache, from whichever set has them, as they were asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamtap.activations import Provenance
from streamtap.cache import CacheStore, Channel, Rows
from streamtap.cache.layout import stored_dtype
from streamtap.errors import NotCached
from streamtap.pooling import ONE_TOKEN, pool
from streamtap.positions import choose_positions
from streamtap.ragged import offsets_of
from streamtap.spec import CaptureSpec
from streamtap.workbench.prompt_keys import Keyed
from streamtap.workbench.pulled import sets_at_hand
from streamtap.workbench.wanted import RowSet, layer_channel, layer_name


@dataclass(frozen=True)
class RowReader:
    """Reads rows of one model and spec.

    ``special_ids`` are the token ids that ``exclude_special_tokens`` leaves out.
    """

    store: CacheStore
    provenance: Provenance
    spec: CaptureSpec
    special_ids: NDArray[np.int32]

    def read(self, keyed: Keyed, layer: int) -> Rows:
        """Rows of ``keyed`` prompts at ``layer``, in their order, pooled as asked.

        Raises:
            NotCached: some are in no set.
            RowsDamaged: some do not match their checksums.
        """
        left = list(range(len(keyed.rows)))
        found: list[tuple[list[int], Rows]] = []
        for candidate in sets_at_hand(self.store, self.provenance, self.spec):
            set_id = self.store.find_set(candidate.identity)
            if set_id is None or not left:
                continue
            here, rows = self._held(set_id, keyed.by(candidate.keys), left, layer)
            if rows is not None:
                found.append((here, self._as_asked(rows, candidate, keyed, here)))
                held = set(here)
                left = [i for i in left if i not in held]
        if left:
            raise NotCached(f"{len(left)} of {len(keyed.rows)} prompts have no rows of layer {layer} in the cache.")
        if not found:
            return no_rows(layer_channel(layer, self.provenance))
        return found[0][1] if len(found) == 1 else _in_order(found)

    def _held(
        self, set_id: int, digests: Sequence[bytes], places: list[int], layer: int
    ) -> tuple[list[int], Rows | None]:
        """Those of ``places`` whose rows a set has, and the rows, None where there are none."""
        asked = list(digests) if len(places) == len(digests) else [digests[i] for i in places]
        name = layer_name(layer)
        try:
            return places, self.store.read(set_id, asked, name)
        except NotCached:  # not all of them
            gone = self.store.missing(set_id, asked, [name])
        lacking = {place for some in gone.values() for place in some}
        here = [place for place in range(len(asked)) if place not in lacking]
        rows = self.store.read(set_id, [asked[place] for place in here], name) if here else None
        return [places[place] for place in here], rows

    def _as_asked(self, rows: Rows, candidate: RowSet, keyed: Keyed, here: Sequence[int]) -> Rows:
        if candidate.choose:
            rows = self._chosen(rows, keyed, here)
        if candidate.pooling == "none":
            return rows
        offsets = np.arange(len(rows.offsets), dtype=np.int64)
        values = pool(rows.values, rows.offsets, candidate.pooling)
        if candidate.pooling in ONE_TOKEN:
            kept = rows.offsets[1:] - 1 if candidate.pooling == "last_token" else rows.offsets[:-1]
            return Rows(values, offsets, rows.token_ids[kept], rows.positions[kept])
        none = np.full(len(values), -1, np.int32)
        return Rows(values, offsets, none, none)

    def _chosen(self, rows: Rows, keyed: Keyed, here: Sequence[int]) -> Rows:
        """The rows at the positions that the spec, or the prompt itself, chooses out of all."""
        places, counts = [], []
        own = self._own_positions(keyed, here)
        excluded = self.special_ids if self.spec.exclude_special_tokens else None
        for i, place in enumerate(here):
            start, stop = int(rows.offsets[i]), int(rows.offsets[i + 1])
            positions = own.get(keyed.rows[place])
            if positions is None:
                token_ids = rows.token_ids[start:stop]
                positions = choose_positions(self.spec.positions, token_ids, excluded_ids=excluded, index=place)
            places.append(start + positions.astype(np.int64))
            counts.append(len(positions))
        picks = np.concatenate(places)
        offsets = offsets_of(counts)
        return Rows(rows.values[picks], offsets, rows.token_ids[picks], rows.positions[picks])

    def _own_positions(self, keyed: Keyed, here: Sequence[int]) -> dict[bytes, NDArray[np.int32] | None]:
        """Positions that prompts chose themselves, by digest; what was worked out just now need not be stored."""
        own = [keyed.rows[i] for i in here if keyed.rows[i] != keyed.tokens[i]]
        stored = [digest for digest in own if digest not in keyed.fresh]
        found = dict(zip(stored, self.store.own_positions(stored), strict=True))
        return found | {digest: keyed.fresh[digest].positions for digest in own if digest in keyed.fresh}


def no_rows(channel: Channel) -> Rows:
    """What a channel holds of no prompts at all."""
    none = np.zeros(0, np.int32)
    return Rows(np.zeros((0, channel.width), stored_dtype(channel.dtype)), np.zeros(1, np.int64), none, none)


def _in_order(found: Sequence[tuple[list[int], Rows]]) -> Rows:
    """Rows that came from several sets, in the order of the prompts."""
    places = np.concatenate([np.asarray(here) for here, _ in found])
    counts = np.concatenate([np.diff(rows.offsets) for _, rows in found])
    starts = offsets_of(counts)[:-1]
    order = np.argsort(places, kind="stable")
    picks = np.concatenate([np.arange(starts[i], starts[i] + counts[i]) for i in order])
    offsets = offsets_of(counts[order])

    def joined(arrays: list[Any]) -> Any:
        return np.concatenate(arrays)[picks]

    return Rows(
        joined([rows.values for _, rows in found]),
        offsets,
        joined([rows.token_ids for _, rows in found]),
        joined([rows.positions for _, rows in found]),
    )
