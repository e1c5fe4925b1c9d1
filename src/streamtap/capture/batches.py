"""Plan the passes over a window of token sequences: which run together, which share a prefix.

Pure arithmetic on lengths and token ids; knows no model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.int32]

#: A shared prefix shorter than this costs more in bookkeeping than it saves.
MIN_SHARED_TOKENS = 32
#: What a group must save in all, since its prefix runs alone in one narrow pass.
MIN_SAVED_TOKENS = 128
#: Prefix states are repeated for each sequence of a batch; this bounds them, in batches' worth of tokens.
_STATE_FACTOR = 8


@dataclass(frozen=True)
class Group:
    """Sequences whose first ``prefix`` tokens are equal and run once; ``prefix`` 0 shares nothing.

    ``members`` are places in the window.
    """

    prefix: int
    members: tuple[int, ...]


def share_prefixes(sequences: Sequence[TokenIds]) -> list[Group]:
    """Group distinct sequences so that many tokens need not run again.

    Every sequence keeps at least one token of its own. What shares nothing worth while comes
    last, in one group of prefix 0.
    """
    order = sorted(range(len(sequences)), key=lambda i: sequences[i].astype(">u4").tobytes())
    common = [_common(sequences[a], sequences[b]) for a, b in pairwise(order)]
    groups = [Group(prefix, tuple(order[place] for place in places)) for prefix, places in _best_runs(common)]
    shared = {member for group in groups for member in group.members}
    alone = tuple(i for i in range(len(sequences)) if i not in shared)
    return [*groups, Group(0, alone)] if alone else groups


def cut_batches(
    group: Group, lengths: Sequence[int], max_prompts: int | None, max_tokens: int
) -> Iterator[tuple[int, ...]]:
    """Cut a group into batches of members, longest first, so that what will not fit shows at once.

    A batch holds at most ``max_prompts`` sequences and, padded, ``max_tokens`` tokens; a
    sequence longer than that runs alone.
    """
    batch: list[int] = []
    for member in sorted(group.members, key=lambda i: -lengths[i]):
        width = lengths[batch[0] if batch else member] - group.prefix
        tokens, states = (len(batch) + 1) * width, (len(batch) + 1) * (width + group.prefix)
        full = tokens > max_tokens or (group.prefix and states > _STATE_FACTOR * max_tokens)
        if batch and (full or len(batch) == max_prompts):
            yield tuple(batch)
            batch = []
        batch.append(member)
    if batch:
        yield tuple(batch)


def _common(a: TokenIds, b: TokenIds) -> int:
    """Tokens that two distinct sequences share from the start, leaving each one of its own."""
    n = min(len(a), len(b)) - 1
    differs = a[:n] != b[:n]
    return int(np.argmax(differs)) if differs.any() else n


def _best_runs(common: Sequence[int]) -> list[tuple[int, list[int]]]:
    """(prefix, places in sorted order) of disjoint groups that save tokens.

    ``common[i]`` tokens are shared by sequences i and i + 1. The runs that share a prefix form
    a tree (the LCP-interval tree of Abouelhoda, Kurtz and Ohlebusch 2004); a node either shares
    its own prefix or leaves longer ones to its children and shares its own among the rest,
    whichever saves more.
    """
    root = _Node(0, 0)
    stack = [root]
    for place, tokens in enumerate([*common, 0]):
        prefix = tokens if tokens >= MIN_SHARED_TOKENS else 0
        node = _Node(prefix, place)
        while stack[-1].prefix > prefix:
            closed = stack.pop()
            closed.settle(last=place)
            node.first = closed.first
            (stack[-1] if stack[-1].prefix >= prefix else node).children.append(closed)
        if stack[-1].prefix < prefix:
            stack.append(node)
    return [run for child in root.children for run in child.runs]


class _Node:
    """A run of neighbours that share ``prefix`` tokens."""

    def __init__(self, prefix: int, first: int) -> None:
        self.prefix, self.first = prefix, first
        self.children: list[_Node] = []
        self.runs: list[tuple[int, list[int]]] = []

    def settle(self, last: int) -> None:
        """Decide, now that the run's end is known, between this prefix and the children's."""
        whole = list(range(self.first, last + 1))
        below = [run for child in self.children for run in child.runs]
        taken = {place for _, places in below for place in places}
        rest = [place for place in whole if place not in taken]
        split = [*below, *self._worth_while(rest)]
        own = self._worth_while(whole)
        self.runs = own if _saved(own) >= _saved(split) else split

    def _worth_while(self, places: list[int]) -> list[tuple[int, list[int]]]:
        run = (self.prefix, places)
        return [run] if _saved([run]) >= MIN_SAVED_TOKENS else []


def _saved(runs: Sequence[tuple[int, list[int]]]) -> int:
    return sum(prefix * (len(places) - 1) for prefix, places in runs)
