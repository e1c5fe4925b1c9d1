"""Reading rows back, checked, in the order asked."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from streamtap.cache.damage import set_aside, set_lost_aside
from streamtap.cache.entries import Placement, find_entries, placement
from streamtap.cache.gather import Target, gather
from streamtap.cache.index import Index
from streamtap.cache.parts import Part, parts_of
from streamtap.cache.prompts import listed
from streamtap.cache.values import AllRows, Rows
from streamtap.errors import NotCached, RowsDamaged
from streamtap.ragged import offsets_of, ranges

Ints = NDArray[np.int64]


def read_rows(index: Index, root: Path, set_id: int, digests: Sequence[bytes], channel: str) -> Rows:
    """Rows of ``digests`` in that order; see ``CacheStore.read``."""
    with index.reading() as db:
        parts, table = find_entries(db, set_id, digests, channel)
    absent = np.flatnonzero(table[:, 0] < 0).tolist()
    if not parts:
        raise NotCached(f"nothing of set {set_id} is cached at {channel!r}.")
    if absent:
        raise NotCached(
            f"{len(absent)} of {len(digests)} prompts are not cached at {channel!r} in set {set_id}: {listed(absent)}."
        )
    first_rows, n_rows = table[:, 1], table[:, 2]
    offsets = offsets_of(n_rows)
    target = Target.empty(parts[0], channel, int(offsets[-1]))
    for part in parts:
        picks = np.flatnonzero(table[:, 0] == part.id)
        if len(picks):
            rows = ranges(first_rows[picks], n_rows[picks])
            gather(root, part, channel, rows, ranges(offsets[picks], n_rows[picks]), target)
    _refuse_damaged(index, root, parts, table[:, 0], digests, offsets, target.bad, channel)
    return Rows(target.values, offsets, target.token_ids, target.positions)


def read_channel(index: Index, root: Path, set_id: int, channel: str) -> AllRows:
    """Every prompt of a set at one channel; see ``CacheStore.read_all``."""
    placements = place_channel(index, set_id, channel)
    digests = tuple(chain.from_iterable(each.digests for each in placements))
    n_rows = np.concatenate([each.n_rows for each in placements])
    offsets = offsets_of(n_rows)
    target = Target.empty(placements[0].part, channel, int(offsets[-1]))
    done = 0
    for each in placements:
        rows = ranges(each.first_rows, each.n_rows)
        gather(root, each.part, channel, rows, np.arange(done, done + len(rows)), target)
        done += len(rows)
    part_ids = np.concatenate([np.full(len(each.digests), each.part.id) for each in placements])
    _refuse_damaged(index, root, [each.part for each in placements], part_ids, digests, offsets, target.bad, channel)
    return AllRows(target.values, offsets, target.token_ids, target.positions, digests)


def place_channel(index: Index, set_id: int, channel: str) -> list[Placement]:
    """The parts that hold a channel, each prompt once.

    Raises:
        NotCached: no prompt of the set has the channel.
    """
    with index.reading() as db:
        parts = [part for part in parts_of(db, set_id) if channel in part.layout.names()]
        placements = [placement(db, part) for part in parts]
    placements = _each_once([each for each in placements if each.digests])
    if not placements:
        raise NotCached(f"no prompt of set {set_id} is cached at {channel!r}.")
    return placements


def _refuse_damaged(
    index: Index,
    root: Path,
    parts: Sequence[Part],
    part_ids: Ints,
    digests: Sequence[bytes],
    offsets: Ints,
    bad: NDArray[np.bool_],
    channel: str,
) -> None:
    if not bad.any():
        return
    owners = np.repeat(np.arange(len(digests)), np.diff(offsets))
    places = np.unique(owners[bad]).tolist()
    # Files that are gone or cut short are named as that; the rest has wrong bytes.
    set_lost_aside(index, root, parts[0].set_id)
    for part in parts:
        hit = [digests[place] for place in places if part_ids[place] == part.id]
        if hit:
            set_aside(index, part, hit, f"rows at {channel!r} do not match their checksum")
    raise RowsDamaged(
        f"stored rows of {len(places)} of {len(digests)} prompts at {channel!r} do not match their checksum: "
        f"{listed(places)}. They were set aside; run these prompts again.",
        places=tuple(places),
    )


def _each_once(placements: list[Placement]) -> list[Placement]:
    """Leave out what an earlier part holds already; two processes may have written a prompt at the same moment."""
    if len(placements) < 2:
        return placements
    seen: set[bytes] = set()
    kept = []
    for each in placements:
        new = [place for place, digest in enumerate(each.digests) if digest not in seen]
        seen.update(each.digests)
        digests = tuple(each.digests[place] for place in new)
        if digests:
            kept.append(Placement(each.part, digests, each.first_rows[new], each.n_rows[new]))
    return kept
