"""The end of a run: statistics merged in shard order, and the manifest, last."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from streamtap.activations import Provenance
from streamtap.errors import InvalidInput
from streamtap.harvest.asked import HarvestAsk
from streamtap.harvest.identity import projection_of
from streamtap.harvest.record import ShardRecord, is_record
from streamtap.harvested.manifest import NAME, STATS_NAME, HarvestManifest, ShardEntry
from streamtap.harvested.places import WritablePlace
from streamtap.harvested.statistics import RowSums
from streamtap.tensor_file import tensor_bytes

_AT_ONCE = 16


@dataclass
class Totals:
    """What the shards come to, taken one after the other in the order of their numbers."""

    sums: RowSums | None = None
    shards: list[ShardEntry] = field(default_factory=list)
    truncated: list[Any] = field(default_factory=list)
    n_tokens: int = 0
    tokenizer_limits: Mapping[str, Any] = field(default_factory=dict)

    def take(self, record: ShardRecord) -> None:
        """The next shard."""
        if record.number != len(self.shards):
            raise InvalidInput(f"shard {record.number} came where {len(self.shards)} was expected.")
        self.sums = record.sums if self.sums is None else self.sums.merged(record.sums)
        self.shards.append(record.entry)
        self.truncated += record.truncated
        self.n_tokens += record.n_tokens
        self.tokenizer_limits = record.tokenizer_limits


def finish(
    place: WritablePlace,
    run_id: str,
    ask: HarvestAsk,
    provenance: Provenance,
    totals: Totals,
    *,
    model_id: str | None = None,
) -> HarvestManifest:
    """Write statistics and manifest, and remove what only an unfinished run needs.

    ``model_id`` is a service's short name of the model; else it is called as ``provenance`` has it.
    """
    layers = ask.layer_indices(provenance.n_layers)
    width = provenance.hidden if ask.projection is None else len(ask.projection.directions)
    sums = totals.sums or RowSums.nothing(len(layers), width)
    place.put(STATS_NAME, _statistics(sums, layers))
    manifest = HarvestManifest(
        run_id=run_id,
        model_id=model_id or provenance.model,
        hf_repo=provenance.model,
        revision=provenance.commit,
        dtype=ask.row_dtype,
        compression=ask.compression,
        capture=ask.capture(),
        add_special_tokens=ask.add_special_tokens,
        layer_indices=layers,
        n_prompts=sum(len(each.prompt_indices) for each in totals.shards),
        contents=ask.contents,
        projection=projection_of(ask.projection),
        statistics={"file": STATS_NAME, "count": sums.count, "excluded": ["bos"]},
        mean_token_norm=tuple(float(each) for each in sums.mean_norm),
        truncated_prompts=tuple(totals.truncated),
        shards=tuple(totals.shards),
        provenance=asdict(provenance),
        tokenizer_limits=dict(totals.tokenizer_limits),
    )
    place.put(NAME, manifest.to_json())
    remove_records(place)
    return manifest


def remove_records(place: WritablePlace) -> None:
    """Remove what the manifest has taken the place of."""
    # Side by side: a store takes its time for each, and there may be thousands.
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="streamtap-removing") as pool:
        list(pool.map(place.delete, filter(is_record, sorted(place.names()))))


def _statistics(sums: RowSums, layers: tuple[int, ...]) -> bytes:
    tensors = {
        "mean": sums.mean.astype(np.float32),
        "std": sums.std.astype(np.float32),
        "layer_indices": np.array(layers, np.int32),
    }
    return tensor_bytes(tensors)
