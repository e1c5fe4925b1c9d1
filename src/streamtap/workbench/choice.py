"""Which of the prompts, layers and logits that the cache holds are published; what is missing is counted and named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streamtap.cache import CacheStore, SetInfo
from streamtap.dataset.names import HIDDEN, LOGITS
from streamtap.errors import InvalidLayers, NotCached
from streamtap.layers import LayerSpec, resolve_layers
from streamtap.workbench.head_holdings import find_logits, lacking
from streamtap.workbench.holdings import Holding
from streamtap.workbench.lacking import lacking_layers
from streamtap.workbench.prompt_keys import Keyed

_SHOWN = 8


@dataclass(frozen=True)
class Chosen:
    """Prompts to publish: their ``places`` in the list that was given, and their digests in the same order."""

    places: list[int]
    digests: list[bytes]
    layers: tuple[int, ...]
    logits: SetInfo | None

    def pick(self, order: NDArray[np.int64]) -> Chosen:
        """The prompts in another order."""
        numbers = order.tolist()
        places, digests = [self.places[i] for i in numbers], [self.digests[i] for i in numbers]
        return Chosen(places, digests, self.layers, self.logits)


def choose(
    store: CacheStore,
    holding: Holding,
    layers: LayerSpec | None,
    kinds: Mapping[str, bool],
    logit_top_k: int | None,
    *,
    skip_missing: bool,
) -> Chosen:
    """What can be published of a holding.

    Args:
        store: The cache.
        holding: The rows that are meant.
        layers: The layers asked for; None takes all that the cache has.
        kinds: The kinds of tensors, and whether each was asked for by name.
        logit_top_k: The size of logits asked for, if any.
        skip_missing: Leave out what is missing, instead of refusing.

    Raises:
        NotCached: prompts that lack something, or all of them do.
    """
    known = {place: digest for place, digest in enumerate(holding.digests) if digest is not None}
    places, digests = list(known), list(known.values())
    reasons: dict[int, str] = {i: "rows" for i in range(len(holding.digests)) if i not in known}
    numbers: tuple[int, ...] = ()
    if HIDDEN in kinds:
        numbers, gone = _layers_held(store, holding, layers, digests)
        reasons |= {places[i]: _layers(absent, numbers) for i, absent in gone.items()}
    logits = None
    if LOGITS in kinds:
        asked, exact = kinds[LOGITS], holding.spec.exact
        logits = find_logits(store, holding.provenance, digests, logit_top_k, exact=exact, asked=asked)
        if logits is not None:
            for i in lacking(store, logits, digests):
                reasons.setdefault(places[i], "logits")
    kept = [place for place in places if place not in reasons]
    if reasons and (not skip_missing or not kept):
        raise NotCached(_missing(reasons, len(holding.digests), holding.provenance.model))
    return Chosen(kept, [known[place] for place in kept], numbers, logits)


def _layers_held(
    store: CacheStore, holding: Holding, layers: LayerSpec | None, digests: list[bytes]
) -> tuple[tuple[int, ...], dict[int, tuple[int, ...]]]:
    """The layers to publish, and those of them that prompts lack, by the prompt's number in ``digests``."""
    keyed = Keyed(digests, digests, [0] * len(digests), {})
    if layers is not None:
        numbers = resolve_layers(layers, holding.provenance.n_layers)
        if not numbers:
            raise InvalidLayers("no layers were asked for; name some with layers=, or leave them out with tensors=.")
        return numbers, lacking_layers(store, holding.provenance, holding.spec, numbers, keyed)
    gone = lacking_layers(store, holding.provenance, holding.spec, holding.layers, keyed)
    if len(gone) < len(digests):
        return holding.layers, gone
    # Of other prompts there may be more layers than of any of these.
    nowhere = frozenset(holding.layers).intersection(*gone.values())
    numbers = tuple(layer for layer in holding.layers if layer not in nowhere)
    if not numbers:
        return holding.layers, gone
    left = {i: tuple(layer for layer in absent if layer in numbers) for i, absent in gone.items()}
    return numbers, {i: absent for i, absent in left.items() if absent}


def _missing(reasons: Mapping[int, str], n_prompts: int, model: str) -> str:
    by_reason: dict[str, list[int]] = {}
    for place in sorted(reasons):
        by_reason.setdefault(reasons[place], []).append(place)
    parts = [f"{len(places)} lack {reason} (prompts {_listed(places)})" for reason, places in by_reason.items()]
    return (
        f"{len(reasons)} of {n_prompts} prompts are not whole in the cache: {'; '.join(parts)}. Extract them with "
        f"UnifiedCache({model!r}, …).warmup(prompts), choose other layers= or tensors=, or leave them out with "
        "skip_missing=True."
    )


def _layers(absent: Sequence[int], asked: Sequence[int]) -> str:
    if len(absent) == len(asked):
        return "rows"
    return f"layer{'s' * (len(absent) > 1)} {_listed(absent)}"


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:_SHOWN]))
    return shown + (", …" if len(numbers) > _SHOWN else "")
