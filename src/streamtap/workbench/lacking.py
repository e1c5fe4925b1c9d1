"""What of a request the cache lacks, per prompt and layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from streamtap.activations import Provenance
from streamtap.cache import CacheStore
from streamtap.errors import PoolingMismatch
from streamtap.pooling import POOLINGS, check_pooling
from streamtap.spec import CaptureSpec
from streamtap.workbench.prompt_keys import Keyed
from streamtap.workbench.pulled import sets_at_hand
from streamtap.workbench.wanted import layer_name, row_identity, score_channels, score_identity

#: What the head gives, in the order it is written.
SCORES = ("perplexity", "token_nll", "logits")
_SHOWN = 8


@dataclass(frozen=True)
class Need:
    """What one prompt lacks: layers, and kinds of head values."""

    layers: tuple[int, ...]
    scores: tuple[str, ...]


def scores_of(spec: CaptureSpec) -> tuple[str, ...]:
    """The kinds of head values that ``spec`` asks for."""
    asked = {"perplexity": spec.perplexity, "token_nll": spec.token_nll, "logits": spec.logits is not None}
    return tuple(kind for kind in SCORES if asked[kind])


def find_needs(
    store: CacheStore, provenance: Provenance, spec: CaptureSpec, layers: Sequence[int], keyed: Keyed
) -> dict[Need, list[int]]:
    """Places of the prompts that lack something, grouped by what they lack; empty when all is there."""
    missing_layers = lacking_layers(store, provenance, spec, layers, keyed)
    missing_scores = {kind: lacking_scores(store, provenance, spec, kind, keyed) for kind in scores_of(spec)}
    needs: dict[Need, list[int]] = {}
    for place in sorted(set(missing_layers).union(*missing_scores.values())):
        scores = tuple(kind for kind, places in missing_scores.items() if place in places)
        needs.setdefault(Need(missing_layers.get(place, ()), scores), []).append(place)
    return needs


def told(needs: Mapping[Need, Sequence[int]], n_prompts: int) -> str:
    """How many of the prompts lack what, for a message."""
    layers = sorted({layer for need in needs for layer in need.layers})
    shown = ", ".join(map(str, layers[:_SHOWN])) + (", …" if len(layers) > _SHOWN else "")
    scores = [kind for kind in SCORES if any(kind in need.scores for need in needs)]
    what = ([f"layer{'s' * (len(layers) > 1)} {shown}"] if layers else []) + scores
    return f"{sum(map(len, needs.values()))} of {n_prompts} prompts lack {' and '.join(what)}"


def lacking_layers(
    store: CacheStore, provenance: Provenance, spec: CaptureSpec, layers: Sequence[int], keyed: Keyed
) -> dict[int, tuple[int, ...]]:
    """Layers that no set has for a prompt, by the prompt's place; only prompts that lack some."""
    if not layers:
        return {}
    lacking: dict[int, frozenset[int]] = dict.fromkeys(range(len(keyed.rows)), frozenset(layers))
    for candidate in sets_at_hand(store, provenance, spec):
        set_id = store.find_set(candidate.identity)
        if set_id is None or not lacking:
            continue
        digests = keyed.by(candidate.keys)
        places = list(lacking)
        gone = store.missing(set_id, [digests[i] for i in places], [layer_name(layer) for layer in layers])
        lacking = _still_lacking(lacking, places, gone)
    return {place: tuple(sorted(left)) for place, left in lacking.items()}


def lacking_scores(
    store: CacheStore, provenance: Provenance, spec: CaptureSpec, kind: str, keyed: Keyed
) -> frozenset[int]:
    """Places of the prompts without head values of ``kind``."""
    set_id = store.find_set(score_identity(provenance, spec, kind))
    if set_id is None:
        return frozenset(range(len(keyed.tokens)))
    channels = [channel.name for channel in score_channels(spec, kind, 1)]
    gone = store.missing(set_id, keyed.tokens, channels)
    return frozenset(place for places in gone.values() for place in places)


def refuse_other_pooling(
    store: CacheStore,
    provenance: Provenance,
    spec: CaptureSpec,
    layers: Sequence[int],
    keyed: Keyed,
    needs: Mapping[Need, Sequence[int]],
) -> None:
    """Refuse to run what is stored under another pooling only: to run it again is for the caller to say.

    Where some of the prompts are there as they were asked for, the others are run like any.

    Raises:
        PoolingMismatch: both poolings are named.
    """
    places = sorted(place for group in needs.values() for place in group)
    if len(places) < len(keyed.rows):
        return
    names = [layer_name(layer) for layer in layers]
    for other in POOLINGS:
        set_id = store.find_set(row_identity(provenance, replace(spec, pooling=check_pooling(other))))
        if other in (spec.pooling, "none") or set_id is None:
            continue
        gone = store.missing(set_id, [keyed.rows[i] for i in places], names)
        there = len(places) - sum(len(rows) for rows in gone.values())
        if there:
            made = "cache_pooled=False" if spec.pooling == "none" else f"pooling={spec.pooling!r}"
            raise PoolingMismatch(
                f"pooling {spec.pooling!r} was asked for, but {there} of {len(keyed.rows)} prompts are stored with "
                f"{other!r} only; ask for {other!r}, or extract them again: UnifiedCache(…, {made}).warmup(prompts)."
            )


def _still_lacking(
    lacking: Mapping[int, frozenset[int]], places: Sequence[int], gone: Mapping[tuple[str, ...], Iterable[int]]
) -> dict[int, frozenset[int]]:
    left: dict[int, frozenset[int]] = {}
    for names, rows in gone.items():
        layers = frozenset(int(name.rpartition("_")[2]) for name in names)
        for row in rows:
            if still := lacking[places[row]] & layers:
                left[places[row]] = still
    return left
