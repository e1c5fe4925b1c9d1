"""Run the batches of one group: a shared prefix once, then the tails over its key-value state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from streamtap.capture.arrays import to_numpy
from streamtap.capture.forward import Forward
from streamtap.capture.head import Head, HeadRows
from streamtap.capture.narrowing import Narrowing
from streamtap.capture.recorder import REDUCED, PassLayout
from streamtap.capture.runs import HostRows, TokenIds, TokenRun
from streamtap.pooling import ONE_TOKEN


@dataclass(frozen=True)
class Ask:
    """What to read in each pass of a run."""

    layers: tuple[int, ...]
    pooling: str
    nll: bool = False
    logits: str | None = None
    top_k: int | None = None
    narrow: Narrowing | None = None

    @property
    def reduces(self) -> bool:
        """Whether pooling needs whole rows of every chosen position, prefix and tail together."""
        return self.pooling in REDUCED

    @property
    def head(self) -> bool:
        """Whether the head runs."""
        return self.nll or self.logits is not None


@dataclass(frozen=True)
class BatchRows:
    """What a batch gave, prompt after prompt in the batch's order.

    ``rows`` is a host tensor [layers, rows, hidden]; ``counts`` the rows of each sequence;
    ``positions`` int32 [rows], -1 for reduced ones. ``nll`` is float32 [tokens - 1] each.
    """

    rows: torch.Tensor | None
    counts: NDArray[np.int64]
    positions: NDArray[np.int32]
    nll: list[NDArray[np.float32]] | None
    logits: list[NDArray[np.float32]] | None
    logit_ids: list[NDArray[np.int32]] | None

    def on_host(self) -> HostRows:
        """The same as arrays."""
        rows = None if self.rows is None else to_numpy(self.rows)
        return HostRows(rows, self.counts, self.positions, self.nll, self.logits, self.logit_ids)


@dataclass(frozen=True)
class Prefix:
    """A prefix that ran once: its states, its rows [layers, positions chosen by any, hidden], its head rows."""

    tokens: int
    states: Any
    positions: NDArray[np.int32]
    rows: torch.Tensor | None
    last_normed: torch.Tensor | None
    head: HeadRows | None


def run_prefix(forward: Forward, head: Head | None, sequences: Sequence[TokenRun], tokens: int, ask: Ask) -> Prefix:
    """Run the first ``tokens`` tokens, equal in all ``sequences``, and keep what any of them needs."""
    ids = sequences[0].token_ids[:tokens]
    wanted = np.unique(np.concatenate([_before(picked(each.chosen, ask.pooling), tokens) for each in sequences]))
    layout = PassLayout((tokens,), (wanted.astype(np.int32),), (sequences[0].name,))
    states = forward.new_states()
    narrow = None if ask.reduces else ask.narrow
    output = forward.run([ids], layout, ask.layers, "none", head=ask.head, states=states, narrow=narrow)
    head_rows = last = None
    if head is not None and output.normed is not None:
        last = output.normed[:, -1:]
        if ask.nll or ask.logits == "all":
            targets = np.concatenate([ids[1:], [-1]]).astype(np.int64)
            head_rows = head.read(output.normed[0], targets, np.full(tokens, ask.logits == "all"), ask.top_k)
    return Prefix(tokens, states, layout.chosen[0], _stacked(output.rows, ask.layers), last, head_rows)


def run_batch(
    forward: Forward, head: Head | None, sequences: Sequence[TokenRun], prefix: Prefix | None, ask: Ask
) -> BatchRows:
    """Run ``sequences`` together, behind ``prefix`` where they share one."""
    start = prefix.tokens if prefix else 0
    tails = [each.token_ids[start:] for each in sequences]
    chosen = [picked(each.chosen, ask.pooling) for each in sequences]
    layout = PassLayout(
        tuple(len(tail) for tail in tails),
        tuple(_from(each, start) for each in chosen),
        tuple(each.name for each in sequences),
        start,
    )
    states = forward.repeated(prefix.states, len(sequences)) if prefix else None
    output = forward.run(tails, layout, ask.layers, ask.pooling, head=ask.head, states=states, narrow=ask.narrow)
    rows = _stacked(output.rows, ask.layers)
    if ask.reduces:
        counts, positions = np.ones(len(sequences), np.int64), np.full(len(sequences), -1, np.int32)
        rows = rows if rows is None else _reduced(rows, chosen, prefix, ask, output.dtype)
    else:
        counts = np.array([len(each) for each in chosen], np.int64)
        positions = np.concatenate(chosen).astype(np.int32)
        rows = rows if rows is None or prefix is None else _with_prefix(rows, chosen, layout, prefix)
    if head is None or output.normed is None:
        return BatchRows(rows, counts, positions, None, None, None)
    return BatchRows(rows, counts, positions, *_head_parts(head, output.normed, tails, prefix, ask))


def picked(chosen: NDArray[np.int32], pooling: str) -> NDArray[np.int32]:
    """The chosen positions that pooling needs: one of them for ``last_token`` and ``first_token``."""
    if pooling not in ONE_TOKEN:
        return chosen
    return chosen[-1:] if pooling == "last_token" else chosen[:1]


def _before(positions: NDArray[np.int32], start: int) -> NDArray[np.int32]:
    return positions[positions < start]


def _from(positions: NDArray[np.int32], start: int) -> NDArray[np.int32]:
    return (positions[positions >= start] - start).astype(np.int32)


def _stacked(rows: dict[int, torch.Tensor], layers: Sequence[int]) -> torch.Tensor | None:
    return torch.stack([rows[layer] for layer in layers]) if layers else None


def _with_prefix(
    rows: torch.Tensor, chosen: Sequence[NDArray[np.int32]], layout: PassLayout, prefix: Prefix
) -> torch.Tensor:
    """Put each sequence's prefix rows before its own, [layers, rows, hidden]."""
    if prefix.rows is None or not prefix.rows.shape[1]:
        return rows
    n_shared, seen = prefix.rows.shape[1], 0
    places: list[NDArray[np.int64]] = []
    for positions, tail in zip(chosen, layout.chosen, strict=True):
        places.append(np.searchsorted(prefix.positions, _before(positions, prefix.tokens)))
        places.append(np.arange(n_shared + seen, n_shared + seen + len(tail)))
        seen += len(tail)
    return torch.cat([prefix.rows, rows], dim=1)[:, torch.from_numpy(np.concatenate(places))]


def _reduced(
    rows: torch.Tensor,
    chosen: Sequence[NDArray[np.int32]],
    prefix: Prefix | None,
    ask: Ask,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Sums or maxima of tails [layers, prompts, hidden], with the prefix's, to means or maxima."""
    pooling = ask.pooling
    if prefix is not None and prefix.rows is not None and prefix.rows.shape[1]:
        shared = torch.stack([_reduce_shared(prefix, each, pooling, rows.dtype) for each in chosen], dim=1)
        rows = torch.maximum(rows, shared) if pooling == "max" else rows + shared
    if pooling != "max":
        rows = rows / torch.tensor([len(each) for each in chosen], dtype=rows.dtype)[None, :, None]
    rows = rows.to(dtype)
    return rows if ask.narrow is None else ask.narrow(rows)


def _reduce_shared(prefix: Prefix, positions: NDArray[np.int32], pooling: str, dtype: torch.dtype) -> torch.Tensor:
    assert prefix.rows is not None
    places = np.searchsorted(prefix.positions, _before(positions, prefix.tokens))
    mine = prefix.rows[:, torch.from_numpy(places)].to(dtype)
    if pooling == "max":
        return mine.amax(dim=1) if len(places) else torch.full_like(prefix.rows[:, 0].to(dtype), float("-inf"))
    return mine.sum(dim=1)


def _head_parts(
    head: Head,
    normed: torch.Tensor,
    tails: Sequence[TokenIds],
    prefix: Prefix | None,
    ask: Ask,
) -> tuple[Any, Any, Any]:
    """(nll, logits, ids) of each sequence; the prefix's last row predicts each tail's first token."""
    lead = 1 if prefix is not None else 0
    if prefix is not None and prefix.last_normed is not None:
        normed = torch.cat([prefix.last_normed.expand(len(tails), 1, -1), normed], dim=1)
    places, targets, keep = [], [], []
    for b, tail in enumerate(tails):
        n = len(tail) + lead
        places.append(b * normed.shape[1] + np.arange(n))
        targets.append(np.concatenate([tail[1 - lead :], [-1]]))
        keep.append(_kept_rows(n, lead, ask.logits))
    flat_places = torch.from_numpy(np.concatenate(places)).to(normed.device)
    needed = np.concatenate(keep) | ((np.concatenate(targets) >= 0) & ask.nll)
    select = torch.from_numpy(np.flatnonzero(needed)).to(normed.device)
    rows = normed.reshape(-1, normed.shape[-1])[flat_places[select]]
    found = head.read(rows, np.concatenate(targets).astype(np.int64)[needed], np.concatenate(keep)[needed], ask.top_k)
    nll = np.full(len(needed), np.nan, np.float32)
    nll[needed] = found.nll
    return _per_sequence(nll, found, keep, prefix, ask)


def _kept_rows(n: int, lead: int, logits: str | None) -> NDArray[np.bool_]:
    keep = np.full(n, logits == "all")
    keep[:lead] = False
    keep[-1] = logits is not None
    return keep


def _per_sequence(
    nll: NDArray[np.float32], found: HeadRows, keep: Sequence[NDArray[np.bool_]], prefix: Prefix | None, ask: Ask
) -> tuple[Any, Any, Any]:
    cuts = np.cumsum([len(each) for each in keep])[:-1]
    shared = prefix.head if prefix is not None else None
    losses = None
    if ask.nll:
        before = [] if shared is None else [shared.nll[:-1]]
        losses = [np.concatenate([*before, each[:-1]]) for each in np.split(nll, cuts)]
    logit_cuts = np.cumsum([int(each.sum()) for each in keep])[:-1]
    return (
        losses,
        _split_logits(found.logits, shared.logits if shared else None, logit_cuts),
        _split_logits(found.ids, shared.ids if shared else None, logit_cuts),
    )


def _split_logits(values: Any, shared: Any, cuts: NDArray[np.int64]) -> Any:
    if values is None:
        return None
    before = [] if shared is None else [shared]
    return [np.concatenate([*before, each]) for each in np.split(values, cuts)]
