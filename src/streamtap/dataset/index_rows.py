"""The columns of an index: what is said of each prompt, and where its rows lie."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from streamtap.dataset.contents import Contents, Plan
from streamtap.dataset.index import Places

Ints = NDArray[np.int64]

_BATCH_PROMPTS = 1 << 15


def index_batches(contents: Contents, plan: Plan) -> Iterator[dict[str, pa.Array]]:
    """The index's columns in the format's order, some prompts after the other."""
    for start in range(0, contents.n_prompts, _BATCH_PROMPTS):
        stop = min(start + _BATCH_PROMPTS, contents.n_prompts)
        given = dict(contents.columns.batch(start, stop))
        finding = _finding_columns(plan, slice(start, stop))
        core = {name: given.pop(name) for name in ("text", "label", "num_tokens")}
        # The format has them among the others, which are sorted by name.
        given.update({name: finding.pop(name) for name in list(finding) if name.startswith("token_shard")})
        yield core | finding | {name: given[name] for name in sorted(given)}


def _finding_columns(plan: Plan, here: slice) -> dict[str, pa.Array]:
    main = plan.hidden or plan.logits
    assert main is not None
    columns = _pair("shard_index", "row_offset", main.places, here)
    if plan.logits is not None:
        columns |= _pair("shard_index_logits", "row_offset_logits", plan.logits.places, here)
    if plan.hidden is not None and plan.hidden.others is not None:
        columns["token_offset"] = pa.array(plan.hidden.places.rows[here], pa.int64())
        tokens, offsets = plan.hidden.token_places(here)
        columns["token_shard_ids"] = _lists(tokens.shards, offsets)
        columns["token_shard_offsets"] = _lists(tokens.rows, offsets)
    return columns


def _pair(shard: str, row: str, places: Places, here: slice) -> dict[str, pa.Array]:
    return {shard: pa.array(places.shards[here], pa.int32()), row: pa.array(places.rows[here], pa.int32())}


def _lists(values: Ints, offsets: Ints) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values, pa.int64()))
