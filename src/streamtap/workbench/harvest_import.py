"""``UnifiedCache.import_harvest``: the rows of a harvest into the cache, under the identity that they have there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from streamtap.activations import Activations
from streamtap.cache import CacheStore, PromptKey
from streamtap.errors import InvalidInput
from streamtap.fingerprint import tokens_digest
from streamtap.layers import LayerSpec
from streamtap.workbench.harvested_rows import Harvest, HarvestedRows, open_harvest
from streamtap.workbench.known_model import KnownModel
from streamtap.workbench.model_source import ModelSource
from streamtap.workbench.prompt_keys import remember_limits
from streamtap.workbench.pulled import PulledModel, remember_pulled
from streamtap.workbench.wanted import layer_channel, layer_name


def import_harvest(
    store: CacheStore,
    source: ModelSource,
    harvest: Harvest | str | Path,
    layers: LayerSpec | None = None,
    progress: bool | None = None,
) -> int:
    """See ``UnifiedCache.import_harvest``."""
    opened = open_harvest(harvest)
    rows = HarvestedRows(opened)
    if (reason := rows.lacks) is not None:
        raise InvalidInput(f"{rows.name} cannot go into the cache: {reason}.")
    if not source.may_be(rows.provenance):
        about = rows.provenance
        raise InvalidInput(
            f"{rows.name} is of {about.model}, commit {about.commit[:19]}, {about.dtype}, which is not the model of "
            "this cache; open one with the model that was harvested."
        )
    _store_rows(store, rows, rows.layers(layers), progress)
    # Last, so that an import that was cut is not taken for a model at hand.
    remember_limits(store, KnownModel(rows.provenance, rows.limits))
    remember_pulled(store, PulledModel(rows.provenance, rows.limits))
    return len(opened)


def _store_rows(store: CacheStore, rows: HarvestedRows, layers: Sequence[int], progress: bool | None) -> None:
    """What the cache lacks of the rows, each prompt's layers as they lack."""
    from streamtap.workbench.progress import progress_bar

    provenance = rows.provenance
    set_id = store.ensure_set(rows.identity, asdict(provenance))
    digests = [tokens_digest(rows.harvest.token_ids(i)) for i in range(len(rows.harvest))]
    gone = store.missing(set_id, digests, [layer_name(layer) for layer in layers])
    groups = [([layer for layer in layers if layer_name(layer) in names], places) for names, places in gone.items()]
    if groups:
        # The cache will vouch for these values.
        rows.harvest.verify()
    per_row = layer_channel(0, provenance).row_bytes
    store.require_space(sum(int(rows.counts[places].sum()) * per_row * len(some) for some, places in groups))
    with progress_bar("importing", sum(len(places) for _, places in groups), show=progress) as advance:
        for some, places in groups:
            channels = [layer_channel(layer, provenance) for layer in some]
            with store.writer(set_id, channels) as writer:
                for acts in rows.blocks(places, some):
                    named = {layer_name(layer): values for layer, values in acts.acts.items()}
                    writer.append(_keys(rows, acts), named, acts.offsets, acts.token_ids, acts.positions)
                    advance(len(acts))


def _keys(rows: HarvestedRows, acts: Activations) -> list[PromptKey]:
    tokens = [rows.harvest.token_ids(int(i)) for i in acts.index]
    return [PromptKey(tokens_digest(ids), ids) for ids in tokens]
