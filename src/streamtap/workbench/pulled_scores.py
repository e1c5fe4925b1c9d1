"""Logits and perplexity out of a dataset, as the cache holds them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamtap.cache import CacheStore, PromptKey
from streamtap.cache.writer import Batch
from streamtap.dataset.reader import Dataset
from streamtap.ragged import offsets_of
from streamtap.spec import CaptureSpec
from streamtap.workbench.pulled_rows import PulledPrompts, clear_others
from streamtap.workbench.wanted import score_channels, score_identity

_PROMPTS = 4096
_PERPLEXITIES = ("perplexity", "token_nll")


def store_logits(store: CacheStore, dataset: Dataset, prompts: PulledPrompts, *, overwrite: bool) -> None:
    """Put the k largest logits of each prompt's last position into the cache."""
    places = dataset.index.logit_places()

    def batches() -> Iterator[Batch]:
        for start in range(0, len(places), _PROMPTS):
            here = np.arange(start, min(start + _PROMPTS, len(places)))
            values, ids = dataset.read_logits(places.pick(here))
            keys = [prompts.keys[i] for i in here.tolist()]
            yield _batch(keys, {"logits": values, "ids": ids}, np.arange(len(keys) + 1))

    _put(store, prompts, _logit_spec(prompts), "logits", batches, len(places), overwrite=overwrite)


def store_perplexity(store: CacheStore, dataset: Dataset, prompts: PulledPrompts, *, overwrite: bool) -> None:
    """Put perplexities into the cache, of each prompt and of each token, where the dataset has them."""
    index = dataset.index
    names = [f"perplexity_{name}" for name in ("mean", "min", "max")]
    if all(index.has(name) for name in names):
        table = np.stack([index.floats(name) for name in names], axis=1)
        single = np.array([len(ids) == 1 for ids in prompts.every_row.token_ids], np.bool_)
        table[single] = np.nan  # one token has no perplexity, whatever was written for it
        here = np.flatnonzero(~np.isnan(table[:, 0]) | single)
        keys = [prompts.keys[i] for i in here.tolist()]
        batch = _batch(keys, {"perplexity": table[here]}, np.arange(len(keys) + 1))
        _put(store, prompts, prompts.spec(), "perplexity", lambda: [batch], len(keys), overwrite=overwrite)
    if index.has("token_perplexity"):
        _store_tokens(store, dataset, prompts, overwrite=overwrite)


def has_logits_here(store: CacheStore, prompts: PulledPrompts) -> bool:
    """Whether logits as the dataset has them are in the cache already."""
    held = prompts.dataset.manifest.logits
    if held is None or not held.shards:
        return False
    return store.find_set(score_identity(prompts.model.provenance, _logit_spec(prompts), "logits")) is not None


def has_perplexity_here(store: CacheStore, prompts: PulledPrompts) -> bool:
    """Whether perplexities of the model are in the cache already."""
    identities = (score_identity(prompts.model.provenance, prompts.spec(), kind) for kind in _PERPLEXITIES)
    return any(store.find_set(identity) is not None for identity in identities)


def _logit_spec(prompts: PulledPrompts) -> CaptureSpec:
    return replace(prompts.spec(), logits="last", logit_top_k=prompts.dataset.logits.k)


def _store_tokens(store: CacheStore, dataset: Dataset, prompts: PulledPrompts, *, overwrite: bool) -> None:
    values, offsets = dataset.index.lists("token_perplexity")
    counts = np.diff(offsets)
    # An empty list is a prompt of one token, or one of which nothing is known.
    here = [i for i, ids in enumerate(prompts.every_row.token_ids) if len(ids) == counts[i] + 1]
    if not here:
        return
    nll = np.log(np.asarray(values, np.float64)).astype(np.float32)[:, None]
    rows = [nll[offsets[i] : offsets[i + 1]] for i in here]
    keys = [prompts.keys[i] for i in here]
    batch = _batch(keys, {"nll": np.concatenate(rows)}, offsets_of(counts[here]))
    n_rows = int(batch.offsets[-1])
    _put(store, prompts, prompts.spec(), "token_nll", lambda: [batch], n_rows, overwrite=overwrite)


def _put(
    store: CacheStore,
    prompts: PulledPrompts,
    spec: CaptureSpec,
    kind: str,
    batches: Callable[[], Iterable[Batch]],
    n_rows: int,
    *,
    overwrite: bool,
) -> None:
    provenance = prompts.model.provenance
    identity, channels = score_identity(provenance, spec, kind), score_channels(spec, kind, _vocabulary(spec))
    if overwrite:
        clear_others(store, identity, batches, channels, n_rows)
    for batch in batches():
        if not batch.keys:
            continue
        set_id = store.ensure_set(identity, asdict(provenance))
        if not store.missing(set_id, [key.digest for key in batch.keys], list(batch.rows)):
            continue
        with store.writer(set_id, channels) as writer:
            writer.append(batch.keys, batch.rows, batch.offsets, batch.token_ids, batch.positions)


def _batch(keys: Sequence[PromptKey], rows: dict[str, NDArray[Any]], offsets: NDArray[np.int64]) -> Batch:
    none = np.full(int(offsets[-1]), -1, np.int32)
    return Batch(keys, rows, np.asarray(offsets, np.int64), none, none)


def _vocabulary(spec: CaptureSpec) -> int:
    # The channel is as wide as the k that was kept, which no vocabulary cuts here.
    return spec.logit_top_k or 1
