"""Run the engine over the prompts that lack something, and commit batch after batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from streamtap.activations import Activations, Provenance
from streamtap.cache import BackgroundWriter, CacheStore, Channel, PromptKey
from streamtap.engines.base import Engine
from streamtap.errors import InvalidPositions
from streamtap.fingerprint import tokens_digest
from streamtap.positions import choose_positions
from streamtap.ragged import offsets_of
from streamtap.spec import CaptureSpec, Prompt
from streamtap.workbench.lacking import Need
from streamtap.workbench.prompt_keys import Keyed, PromptKeys
from streamtap.workbench.wanted import layer_channel, layer_name, row_identity, score_channels, score_identity

if TYPE_CHECKING:
    from streamtap.workbench.progress import Advance

# Index entries, checksums and unfilled ends, on top of the values themselves.
_OVERHEAD = 1.05
_INDEX_BYTES = 400


@dataclass(frozen=True)
class Job:
    """Prompts that lack the same: whole keys, and what to ask of the engine for them."""

    need: Need
    keys: list[PromptKey]


def estimate_bytes(jobs: Sequence[Job], provenance: Provenance, spec: CaptureSpec, vocabulary: int) -> int:
    """Bytes that the jobs will write, from above."""
    return int(_OVERHEAD * sum(_job_bytes(job, provenance, spec, vocabulary) for job in jobs))


def plan_jobs(finder: PromptKeys, needs: Mapping[Need, Sequence[int]], keyed: Keyed) -> list[Job]:
    """The jobs that fill ``needs``, equal prompts once each.

    Raises:
        InvalidPositions: a prompt whose rows are lacking has none at the positions asked for.
    """
    jobs = []
    for need, places in needs.items():
        first: dict[bytes, int] = {}
        for place in places:
            first.setdefault(keyed.rows[place], place)
        job = Job(need, finder.keys(list(first), keyed.fresh))
        if need.layers:
            finder.check_positions(job.keys, list(first.values()))
        jobs.append(job)
    return jobs


def run_job(
    store: CacheStore, engine: Engine, provenance: Provenance, spec: CaptureSpec, job: Job, advance: Advance
) -> None:
    """Capture what ``job`` lacks; each batch is in the cache once it is durable, whatever happens later."""
    asked = replace(
        spec,
        layers=job.need.layers,
        perplexity="perplexity" in job.need.scores,
        token_nll="token_nll" in job.need.scores,
        logits=spec.logits if "logits" in job.need.scores else None,
    )
    if not job.need.layers:  # what the head gives does not depend on which positions have rows
        asked = replace(asked, positions="all", exclude_special_tokens=False)
    prompts = (Prompt(token_ids=key.token_ids, positions=key.positions if asked.layers else None) for key in job.keys)
    with ExitStack() as stack:
        sinks = _open_sinks(store, provenance, spec, job.need, engine.tokenizer.vocabulary or 0, stack)
        for acts in engine.capture(prompts, asked, ordered=False):
            keys = [job.keys[i] for i in acts.index]
            for kind, sink in sinks.items():
                sink.append(*_batch(kind, keys, acts))
            advance(len(acts))


def _open_sinks(
    store: CacheStore, provenance: Provenance, spec: CaptureSpec, need: Need, vocabulary: int, stack: ExitStack
) -> dict[str, BackgroundWriter]:
    about = asdict(provenance)
    sets: dict[str, tuple[Mapping[str, Any], Sequence[Channel]]] = {}
    if need.layers:
        sets["rows"] = (row_identity(provenance, spec), [layer_channel(layer, provenance) for layer in need.layers])
    for kind in need.scores:
        channels = score_channels(spec, kind, vocabulary)
        sets[kind] = (score_identity(provenance, spec, kind), channels)
    return {
        kind: stack.enter_context(BackgroundWriter(store.writer(store.ensure_set(identity, about), channels)))
        for kind, (identity, channels) in sets.items()
    }


def _batch(kind: str, keys: Sequence[PromptKey], acts: Activations) -> tuple[Any, ...]:
    """(keys, rows, offsets, token ids, positions) for the writer."""
    if kind == "rows":
        rows = {layer_name(layer): values for layer, values in acts.acts.items()}
        return keys, rows, acts.offsets, acts.token_ids, acts.positions
    bare = [PromptKey(*_bare(key)) for key in keys]
    if kind == "perplexity":
        return _scores(bare, {"perplexity": acts.perplexity}, np.arange(len(keys) + 1))
    if kind == "token_nll":
        losses = acts.token_nll or ()
        offsets = offsets_of([len(each) for each in losses])
        values = np.concatenate([*losses, np.zeros(0, np.float32)]).reshape(-1, 1)
        return _scores(bare, {"nll": values}, offsets)
    logits = {"logits": acts.logits} | ({} if acts.logit_ids is None else {"ids": acts.logit_ids})
    return _scores(bare, logits, acts.logit_offsets)


def _scores(keys: Sequence[PromptKey], rows: Mapping[str, Any], offsets: Any) -> tuple[Any, ...]:
    none: NDArray[np.int32] = np.full(int(offsets[-1]), -1, np.int32)
    return keys, rows, np.asarray(offsets, np.int64), none, none


def _bare(key: PromptKey) -> tuple[bytes, NDArray[np.int32]]:
    """The key of the tokens alone: head values do not depend on the positions that have rows."""
    return (key.digest if key.positions is None else tokens_digest(key.token_ids)), key.token_ids


def _job_bytes(job: Job, provenance: Provenance, spec: CaptureSpec, vocabulary: int) -> int:
    tokens = sum(len(key.token_ids) for key in job.keys)
    rows = sum(_most_rows(key, spec) for key in job.keys) if job.need.layers else 0
    per_row = sum(layer_channel(layer, provenance).row_bytes for layer in job.need.layers)
    total = rows * per_row + len(job.keys) * _INDEX_BYTES
    for kind in job.need.scores:
        per_score = sum(channel.row_bytes for channel in score_channels(spec, kind, vocabulary))
        per_token = kind == "token_nll" or (kind == "logits" and spec.logits == "all")
        total += per_score * (tokens if per_token else len(job.keys))
    return total


def _most_rows(key: PromptKey, spec: CaptureSpec) -> int:
    """Rows of one prompt, special tokens counted as if they had some."""
    if spec.pooling != "none":
        return 1
    if key.positions is not None:
        return len(key.positions)
    try:
        return len(choose_positions(spec.positions, key.token_ids))
    except InvalidPositions:
        return 0
