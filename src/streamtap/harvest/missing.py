"""The ledger of a run: which of its prompts lie whole at the place, and which are missing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from streamtap.harvest.record import is_record, read_record
from streamtap.harvested.manifest import NAME, ShardEntry, read_manifest
from streamtap.harvested.places import WritablePlace


def missing_prompts(place: WritablePlace, n_prompts: int) -> NDArray[np.int64]:
    """Those of the run's ``n_prompts`` that are in no whole shard yet, int64 [prompts], ascending.

    Raises:
        HarvestDamaged: the place holds a manifest or a record that says nothing.
        TransferFailed: the store fails.
    """
    missing, there = np.ones(n_prompts, bool), place.names()
    for entry in _whole(place, there):
        if entry.key in there:
            missing[[index for index in entry.prompt_indices if index < n_prompts]] = False
    return np.flatnonzero(missing)


def _whole(place: WritablePlace, there: set[str]) -> Iterator[ShardEntry]:
    if NAME in there:
        yield from read_manifest(place.get(NAME), f"{place.url}/{NAME}").shards
        return
    for name in sorted(there):
        if is_record(name):
            yield read_record(place.get(name), name).entry
