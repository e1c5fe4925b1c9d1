"""Models of which rows were pulled out of datasets: what is known of them, and which of their rows serve a request."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from streamtap.activations import Provenance
from streamtap.cache import CacheStore
from streamtap.errors import InvalidInput
from streamtap.spec import CaptureSpec
from streamtap.workbench.identity import identity_of
from streamtap.workbench.wanted import RowSet, serving_sets

_CONTENT = re.compile(r"[0-9a-f]{40}|sha256:.+")
#: What stands where no commit was known.
NO_COMMIT = (None, "", "unknown")


@dataclass(frozen=True)
class PulledModel:
    """A model as a dataset described it.

    ``unknown`` names what the dataset does not record of how its rows were made; where that is anything, prompts are
    known by their text alone.
    """

    provenance: Provenance
    limits: Mapping[str, Any]
    unknown: tuple[str, ...] = ()


def names_content(commit: str | None) -> bool:
    """Whether a commit is that of one content, and no branch, tag or nothing at all."""
    return commit is not None and _CONTENT.fullmatch(commit) is not None


def text_commit(name: str, commit: str | None) -> str:
    """The commit of a model whose rows go by text; where it names no content it holds for models of this name alone."""
    if commit in NO_COMMIT:
        return f"unknown:{name}"
    return str(commit) if names_content(commit) else f"{commit} of {name}"


def remember_pulled(store: CacheStore, pulled: PulledModel) -> None:
    """Keep a model beside those of its name that were pulled before, as one with those that cannot be told from it."""
    before = pulled_models(store, pulled.provenance.model)
    mine = identity_of(pulled.provenance)
    same = [each for each in before if identity_of(each.provenance) == mine]
    # What is known of the depth is sometimes only the highest layer of a dataset.
    depth = max(each.provenance.n_layers for each in [*same, pulled])
    width = max(each.provenance.hidden for each in [*same, pulled])
    merged = replace(pulled, provenance=replace(pulled.provenance, n_layers=depth, hidden=width))
    listed = [
        {"provenance": asdict(each.provenance), "limits": dict(each.limits), "unknown": list(each.unknown)}
        for each in [*(each for each in before if each not in same), merged]
    ]
    store.remember(_key(pulled.provenance.model), {"models": listed})


def pulled_models(store: CacheStore, name: str) -> list[PulledModel]:
    """The models called ``name`` of which rows were pulled, the newest last."""
    known = store.recall(_key(name)) or {"models": []}
    return [
        PulledModel(Provenance(**each["provenance"]), each["limits"], tuple(each["unknown"]))
        for each in known["models"]
    ]


def find_pulled(
    store: CacheStore, name: str, revision: str | None, dtype: str, quantization: Any = None
) -> PulledModel | None:
    """The one pulled model that fits what was asked for, None where there is none.

    Of several that differ in nothing that a caller can name, it is the newest of those that are known best. A
    ``quantization`` of None means a model that is not quantised, and a config any that is.

    Raises:
        InvalidInput: several fit; it says which, and which argument picks one.
    """
    found = [each for each in pulled_models(store, name) if dtype in ("auto", each.provenance.dtype)]
    if revision is not None:
        found = [each for each in found if _is_of_revision(each.provenance, revision)]
    found = [each for each in found if _is_quantised_as(each.provenance, quantization)]
    kinds = sorted({tuple(_asked_by(each).items()) for each in found}, key=repr)
    if len(kinds) > 1:
        abouts = [dict(kind) for kind in kinds]
        differ = [key for key in abouts[0] if len({about[key] for about in abouts}) > 1]
        listed = "; ".join(", ".join(f"{key}={about[key]!r}" for key in differ) for about in abouts)
        raise InvalidInput(
            f"rows of {len(kinds)} different models called {name} were pulled: {listed}. Pick one with {differ[0]}=."
        )
    return min(reversed(found), key=lambda each: len(each.unknown), default=None)


def _asked_by(pulled: PulledModel) -> dict[str, str | None]:
    """What of it a caller can ask for, by the argument."""
    about = pulled.provenance
    return {"revision": about.commit, "dtype": about.dtype, "quantization": about.quantization}


def sets_at_hand(store: CacheStore, provenance: Provenance, spec: CaptureSpec) -> Iterator[RowSet]:
    """Sets whose rows can serve ``spec``: the model's own, then what was pulled of the same model by text alone."""
    yield from serving_sets(provenance, spec)
    for each in pulled_models(store, provenance.model):
        if each.unknown and each.provenance != provenance and _is_same_model(each.provenance, provenance):
            for candidate in serving_sets(each.provenance, spec):
                if not candidate.choose:
                    yield replace(candidate, by_text=True)


def _is_of_revision(pulled: Provenance, revision: str) -> bool:
    name, commit = pulled.model, pulled.commit
    if commit == text_commit(name, None):
        return commit == revision
    if commit.endswith(f" of {name}"):
        return revision in (commit, commit.removesuffix(f" of {name}"))
    return commit.startswith(revision)


def _is_quantised_as(pulled: Provenance, asked: Any) -> bool:
    if asked is None or isinstance(asked, str):
        return pulled.quantization == asked
    # What a config becomes in a provenance is known to the library that loads with it.
    return pulled.quantization is not None


def _is_same_model(pulled: Provenance, asked: Provenance) -> bool:
    name = asked.model
    if pulled.commit not in (asked.commit, text_commit(name, asked.commit), text_commit(name, None)):
        return False
    alike = ("dtype", "hidden", "quantization")
    return all(getattr(pulled, name) == getattr(asked, name) for name in alike)


def _key(name: str) -> str:
    return f"pulled:{name}"
