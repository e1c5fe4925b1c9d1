"""The sets that a cache reads and writes, and which wider sets can stand in for a narrower one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from streamtap.activations import Provenance
from streamtap.cache import Channel
from streamtap.positions import canonical_positions, is_own_to_prompt
from streamtap.spec import CaptureSpec
from streamtap.workbench.identity import identity_of


@dataclass(frozen=True)
class RowSet:
    """One set of rows: its identity, and how its rows become those that were asked for.

    ``choose`` says that the asked positions must be picked from all of a prompt's rows;
    ``pooling`` is the pooling still to be done, ``"none"`` if none. ``by_text`` says that it knows prompts by their
    text alone.
    """

    identity: Mapping[str, Any]
    pooling: str = "none"
    choose: bool = False
    by_text: bool = False

    @property
    def keys(self) -> str:
        """Which of a prompt's keys finds its rows here; see ``Keyed.by``."""
        if self.by_text:
            return "texts"
        return "tokens" if self.choose else "rows"


def layer_channel(layer: int, provenance: Provenance) -> Channel:
    """The channel that holds a layer's rows."""
    return Channel(layer_name(layer), provenance.dtype, provenance.hidden)


def layer_name(layer: int) -> str:
    """Name of the channel of block ``layer``."""
    return f"layer_{layer}"


def row_identity(provenance: Provenance, spec: CaptureSpec) -> dict[str, Any]:
    """Identity of the rows that ``spec`` asks of a model."""
    return {
        **identity_of(provenance),
        "kind": "rows",
        "site": spec.site,
        "exact": spec.exact,
        "positions": canonical_positions(spec.positions),
        "exclude_special_tokens": bool(spec.exclude_special_tokens) and not is_own_to_prompt(spec.positions),
        "pooling": spec.pooling,
    }


def serving_sets(provenance: Provenance, spec: CaptureSpec) -> Iterator[RowSet]:
    """Sets whose rows can serve ``spec``, the one that is written first: raw rows serve any pooling, exact ones any."""
    for exact in (True,) if spec.exact else (False, True):
        asked = replace(spec, exact=exact)
        yield RowSet(row_identity(provenance, asked))
        if spec.pooling != "none":
            yield RowSet(row_identity(provenance, replace(asked, pooling="none")), spec.pooling)
        if canonical_positions(spec.positions) != "all" or spec.exclude_special_tokens:
            whole = replace(asked, pooling="none", positions="all", exclude_special_tokens=False)
            yield RowSet(row_identity(provenance, whole), spec.pooling, choose=True)


def score_identity(provenance: Provenance, spec: CaptureSpec, kind: str) -> dict[str, Any]:
    """Identity of what the head gave: ``perplexity``, ``token_nll`` or ``logits``."""
    top_k = None if spec.logit_top_k is None else int(spec.logit_top_k)
    more = {"positions": spec.logits, "top_k": top_k} if kind == "logits" else {}
    return {**identity_of(provenance), "kind": kind, "exact": spec.exact, **more}


def score_channels(spec: CaptureSpec, kind: str, vocabulary: int) -> tuple[Channel, ...]:
    """The channels of a kind of head values."""
    if kind == "perplexity":
        return (Channel("perplexity", "float64", 3),)
    if kind == "token_nll":
        return (Channel("nll", "float32", 1),)
    if spec.logit_top_k is None:
        return (Channel("logits", "float32", vocabulary),)
    width = min(spec.logit_top_k, vocabulary)
    return (Channel("logits", "float32", width), Channel("ids", "int32", width))
