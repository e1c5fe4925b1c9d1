"""What the cache holds of a model for given prompts: one coherent set of rows, or how to pick one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from streamtap.activations import Provenance
from streamtap.cache import CacheStore, SetInfo
from streamtap.errors import InvalidInput, NotCached
from streamtap.positions import from_canonical
from streamtap.spec import CaptureSpec, Prompt
from streamtap.workbench.identity import identity_of
from streamtap.workbench.known_model import KnownModel
from streamtap.workbench.prompt_keys import recall_limits
from streamtap.workbench.pulled import pulled_models
from streamtap.workbench.tokenised import find_tokenised
from streamtap.workbench.wanted import serving_sets

#: What sets may differ in, and the argument of ``push_dataset`` that picks one.
PICKS = (
    *("revision", "dtype", "pooling", "positions", "exclude_special_tokens", "exact", "quantization", "engine"),
    "tokenizer",
)
_OWN = "of-the-prompt"


@dataclass(frozen=True)
class Holding:
    """One coherent set of rows: whose they are, how they were taken, and which prompts are known to it.

    ``identity`` is the set's, and ``spec`` says what to publish, which may be pooled from it. ``digests`` are one a
    prompt, None for those that were never tokenised for this model, and ``rules`` the numbers in ``RULES`` of how that
    was done. The set, and those that stand in for it, have rows of ``n_held`` of the prompts, and the layers ``layers``
    of some prompt.
    """

    provenance: Provenance
    limits: Mapping[str, Any]
    spec: CaptureSpec
    identity: Mapping[str, Any]
    digests: list[bytes | None]
    rules: list[int]
    layers: tuple[int, ...]
    n_held: int

    @property
    def is_partial(self) -> bool:
        """Whether the rows are of some positions only."""
        return self.identity["positions"] != "all" or bool(self.identity["exclude_special_tokens"])

    def about(self) -> dict[str, Any]:
        """What it could differ in from another, by the argument that picks it."""
        return _about(self.provenance, self.identity)


def find_holding(store: CacheStore, model: str, prompts: Sequence[Prompt], picks: Mapping[str, Any]) -> Holding:
    """The one set of rows of ``model`` that holds some of ``prompts``.

    Args:
        store: The cache.
        model: Name of the model, as the rows' makers gave it.
        prompts: What is to be published.
        picks: Values of ``PICKS``, ``generation_prompt`` and ``truncate`` that were asked for, None where any will do.

    Raises:
        NotCached: no set holds any of them; it says which models and sets there are.
        InvalidInput: more than one does; it says which, and which argument picks one.
    """
    sets = [info for info in store.sets() if info.identity.get("kind") == "rows" and _is_of_now(info)]
    of_model = [info for info in sets if info.provenance.get("model") == model]
    if not of_model:
        names = sorted({str(info.provenance.get("model")) for info in sets})
        there = f"it holds rows of {', '.join(names)}" if names else "it holds no rows at all"
        raise NotCached(
            f"the cache {store.root} holds no rows of {model!r}; {there}. "
            "Extract them first: UnifiedCache(model).warmup(prompts)."
        )
    fitting = [info for info in of_model if _fits(info, picks)]
    usable = [info for info in fitting if not _is_by_text(store, info) and info.identity["positions"] != _OWN]
    found = [each for each in (_holding(store, info, prompts, picks) for info in usable) if each is not None]
    narrowed = _preferred(found, picks.get("pooling"))
    if len(narrowed) == 1:
        return narrowed[0]
    if not narrowed:
        raise NotCached(_none_held(store, model, of_model, fitting, usable, len(prompts)))
    raise InvalidInput(_several(model, narrowed, len(prompts)))


def _is_of_now(info: SetInfo) -> bool:
    """Whether this version would make the same rows, and the set holds any."""
    mine = identity_of(_provenance(info))
    return bool(info.channels) and all(info.identity.get(key) == value for key, value in mine.items())


def _is_by_text(store: CacheStore, info: SetInfo) -> bool:
    """Whether its prompts are known by their texts alone, so that nobody could tell what was published."""
    mine = identity_of(_provenance(info))
    models = pulled_models(store, str(info.provenance["model"]))
    return any(each.unknown and identity_of(each.provenance) == mine for each in models)


def _holding(store: CacheStore, info: SetInfo, prompts: Sequence[Prompt], picks: Mapping[str, Any]) -> Holding | None:
    provenance = _provenance(info)
    limits = recall_limits(store, provenance)
    if limits is None:
        return None
    pooling = picks.get("pooling") or info.identity["pooling"]
    spec = CaptureSpec(
        layers=(),
        positions=from_canonical(info.identity["positions"]),
        pooling=pooling,
        exclude_special_tokens=bool(info.identity["exclude_special_tokens"]),
        exact=bool(info.identity["exact"]),
    )
    known = find_tokenised(store, KnownModel(provenance, limits), spec, prompts, picks)
    held, layers = _held(store, info, known.every()), _layers(info)
    if not held:
        return None
    for other in _standing_in(store, provenance, spec):
        if more := _held(store, other, known.every()):
            held |= more
            layers |= _layers(other)
    digests, rules = known.choose(held)
    n_held = sum(digest in held for digest in digests)
    return Holding(provenance, limits, spec, info.identity, digests, rules, tuple(sorted(layers)), n_held)


def _standing_in(store: CacheStore, provenance: Provenance, spec: CaptureSpec) -> list[SetInfo]:
    """Every set whose rows serve ``spec``, as ``RowReader`` finds them."""
    numbers = {store.find_set(each.identity) for each in serving_sets(provenance, spec)}
    return [info for info in store.sets() if info.id in numbers and info.channels]


def _layers(info: SetInfo) -> set[int]:
    return {int(each.name.rpartition("_")[2]) for each in info.channels if each.name.startswith("layer_")}


def _held(store: CacheStore, info: SetInfo, digests: Sequence[bytes]) -> set[bytes]:
    """Those of which a set has any rows."""
    names = [channel.name for channel in info.channels]
    lacking = store.missing(info.id, digests, names).get(tuple(names), [])
    return set(digests) - {digests[place] for place in lacking}


def _fits(info: SetInfo, picks: Mapping[str, Any]) -> bool:
    about = _about(_provenance(info), info.identity)
    for name, asked in picks.items():
        if asked is None:
            continue
        if name == "pooling":
            # Rows that were never pooled serve any pooling.
            if about["pooling"] not in (asked, "none"):
                return False
        elif name == "revision":
            if not str(about["revision"]).startswith(str(asked)):
                return False
        elif name in about and about[name] != asked:
            return False
    return True


def _preferred(found: Sequence[Holding], pooling: str | None) -> list[Holding]:
    """Without doubles: where a pooling was asked for, its own rows go before those that it would be made from."""
    own = [each for each in found if each.identity["pooling"] == pooling]
    rest = [each.about() | {"pooling": None} for each in own]
    return own + [each for each in found if each not in own and (each.about() | {"pooling": None}) not in rest]


def _about(provenance: Provenance, identity: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "revision": provenance.commit,
        "dtype": provenance.dtype,
        "pooling": identity["pooling"],
        "positions": identity["positions"],
        "exclude_special_tokens": identity["exclude_special_tokens"],
        "exact": identity["exact"],
        "quantization": provenance.quantization or "none",
        "engine": provenance.engine,
        "tokenizer": provenance.tokenizer,
    }


def _several(model: str, found: Sequence[Holding], n_prompts: int) -> str:
    abouts = [each.about() for each in found]
    differ = [name for name in PICKS if _differ(abouts, name)]
    lines = "; ".join(
        f"{', '.join(f'{name}={about[name]!r}' for name in differ)} ({each.n_held} of {n_prompts} prompts)"
        for about, each in zip(abouts, found, strict=True)
    )
    return f"the cache holds {len(found)} different sets of rows of {model}: {lines}. Pick one with {differ[0]}=."


def _none_held(
    store: CacheStore,
    model: str,
    of_model: Sequence[SetInfo],
    fitting: Sequence[SetInfo],
    usable: Sequence[SetInfo],
    n_prompts: int,
) -> str:
    if not fitting:
        abouts = [_about(_provenance(info), info.identity) for info in of_model]
        differ = [name for name in PICKS if name in ("pooling", "dtype", "revision") or _differ(abouts, name)]
        held = "; ".join(sorted({", ".join(f"{name}={about[name]!r}" for name in differ) for about in abouts}))
        return f"the cache holds no rows of {model} as asked for; it holds {held}."
    if not usable and any(info.identity["positions"] == _OWN for info in fitting):
        return (
            f"the cached rows of {model} are at positions that each prompt chose itself (one role's turns, or a mask), "
            "which a dataset has no words for; extract them with positions= that are the same for all prompts."
        )
    if not usable:
        return (
            f"the cached rows of {model} were pulled from a dataset that does not record how they were made, so they "
            "cannot be published as yours; copy that dataset, or extract them: UnifiedCache(model).warmup(prompts)."
        )
    return (
        f"none of the {n_prompts} prompts is among the rows of {model} in the cache {store.root}; "
        "extract them first: UnifiedCache(model).warmup(prompts)."
    )


def _differ(abouts: Sequence[Mapping[str, Any]], name: str) -> bool:
    return len({repr(about[name]) for about in abouts}) > 1


def _provenance(info: SetInfo) -> Provenance:
    return Provenance(**info.provenance)


def held_sets(store: CacheStore, provenance: Provenance, kind: str) -> Iterator[SetInfo]:
    """Sets of head values of one kind and of exactly this model."""
    mine = identity_of(provenance)
    for info in store.sets():
        if info.identity.get("kind") == kind and all(info.identity.get(key) == value for key, value in mine.items()):
            yield info
