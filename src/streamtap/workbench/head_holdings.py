"""What the cache holds of a model's head for given prompts: logits and perplexity, beside their rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from streamtap.activations import Provenance
from streamtap.cache import CacheStore, SetInfo
from streamtap.errors import InvalidInput, NotCached
from streamtap.workbench.holdings import held_sets


def find_logits(
    store: CacheStore, provenance: Provenance, digests: Sequence[bytes], top_k: int | None, *, exact: bool, asked: bool
) -> SetInfo | None:
    """The set of last-position logits that holds some of the prompts, None where there is none.

    Args:
        store: The cache.
        provenance: The model.
        digests: Prompts by their tokens.
        top_k: The k that was asked for, None where any will do.
        exact: Whether only values of prompts that ran alone will do.
        asked: Whether logits were asked for by name, so that there must be some.

    Raises:
        InvalidInput: only logits that the format has no place for (all positions, the whole vocabulary), or several k.
        NotCached: they were asked for, and there are none.
    """
    held = [info for info in held_sets(store, provenance, "logits") if _holds(store, info, digests)]
    held = [info for info in held if bool(info.identity["exact"]) is exact]
    fit = [info for info in held if info.identity["positions"] == "last" and info.identity["top_k"] is not None]
    if top_k is not None:
        fit = [info for info in fit if info.identity["top_k"] == top_k]
    if len(fit) > 1:
        ks = ", ".join(str(info.identity["top_k"]) for info in fit)
        raise InvalidInput(f"the cache holds logits of several sizes (k = {ks}); pick one with logit_top_k=.")
    if fit:
        return fit[0]
    if held and not asked and top_k is None:
        raise InvalidInput(f"{_no_place(held[0])} Leave them out with tensors=['hidden_layers'].")
    if held and top_k is None:
        raise InvalidInput(_no_place(held[0]))
    if asked or top_k is not None:
        k = "" if top_k is None else f" with k = {top_k}"
        raise NotCached(
            f"the cache holds no last-position logits{k} of these prompts; extract them: "
            "UnifiedCache(model, cache_logits=True, logit_top_k=50).warmup(prompts)."
        )
    return None


def read_perplexity(
    store: CacheStore, provenance: Provenance, digests: Sequence[bytes], *, exact: bool
) -> NDArray[np.float64] | None:
    """Mean, minimum and maximum, float64 [prompts, 3], NaN where it is not known; None where the cache holds none."""
    for info in held_sets(store, provenance, "perplexity"):
        if bool(info.identity["exact"]) is exact and _holds(store, info, digests):
            values = np.full((len(digests), 3), np.nan)
            here = _places(store, info, digests)
            values[here] = store.read(info.id, [digests[i] for i in here], "perplexity").values
            return values
    return None


def find_token_perplexity(
    store: CacheStore, provenance: Provenance, digests: Sequence[bytes], *, exact: bool
) -> SetInfo | None:
    """The set that holds some of the prompts' token perplexities, None where there is none."""
    held = (info for info in held_sets(store, provenance, "token_nll") if bool(info.identity["exact"]) is exact)
    return next((info for info in held if _holds(store, info, digests)), None)


def read_token_perplexity(
    store: CacheStore, info: SetInfo, digests: Sequence[bytes]
) -> list[NDArray[np.float64] | None]:
    """Of every token but the first, float64 [tokens - 1] a prompt, None where it is not known."""
    found: list[NDArray[np.float64] | None] = [None] * len(digests)
    here = _places(store, info, digests)
    if not here:
        return found
    rows = store.read(info.id, [digests[i] for i in here], "nll")
    for number, place in enumerate(here):
        nll = rows.values[rows.offsets[number] : rows.offsets[number + 1], 0]
        found[place] = np.exp(nll.astype(np.float64))
    return found


def lacking(store: CacheStore, info: SetInfo, digests: Sequence[bytes]) -> set[int]:
    """Places of the prompts that a set does not hold."""
    gone = store.missing(info.id, digests, [channel.name for channel in info.channels])
    return {place for places in gone.values() for place in places}


def _holds(store: CacheStore, info: SetInfo, digests: Sequence[bytes]) -> bool:
    return len(lacking(store, info, digests)) < len(digests)


def _places(store: CacheStore, info: SetInfo, digests: Sequence[bytes]) -> list[int]:
    absent = lacking(store, info, digests)
    return [place for place in range(len(digests)) if place not in absent]


def _no_place(info: SetInfo) -> str:
    if info.identity["positions"] == "all":
        what = "the cached logits are of all positions, which have no place in the format: it holds the last one's."
    else:
        what = "the cached logits are of the whole vocabulary, and the format holds the k largest."
    return f"{what} Extract them with cache_logits=True, logit_positions='last', logit_top_k=50."
