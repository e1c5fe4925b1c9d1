"""Cut a stream of prompts into windows: tokenised, equal ones found, results put back together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from streamtap.activations import Activations, Provenance
from streamtap.capture.runs import HostRows, TokenRun
from streamtap.engines.tokenizing import PromptTokenizer, Tokens
from streamtap.fingerprint import tokens_digest
from streamtap.ragged import offsets_of
from streamtap.spec import CaptureSpec, Prompt, PromptLike

#: Prompts whose token ids are held at once; a longer look ahead sorts better and shares more.
WINDOW_PROMPTS = 4096
#: Rows and logits held at once where they must wait to be put in the caller's order.
ORDERED_BYTES = 256 << 20


@dataclass(frozen=True)
class HeldBytes:
    """Bytes that one position's rows take, over all layers, and its logits."""

    row: int
    logits: int


@dataclass(frozen=True)
class Window:
    """Prompts that are planned together.

    ``runs`` are the distinct sequences; ``places[u]`` the places, in the caller's list, of the
    prompts that run ``u`` stands for; ``tokens[u]`` the whole prompt.
    """

    runs: list[TokenRun]
    tokens: list[Tokens]
    places: list[list[int]]

    def activations(
        self, members: Sequence[int], rows: HostRows, layers: Sequence[int], spec: CaptureSpec, provenance: Provenance
    ) -> Activations:
        """The rows of runs ``members`` as ``Activations``, equal prompts repeated."""
        offsets = offsets_of(rows.counts)
        distinct = Activations(
            acts={} if rows.rows is None else {layer: rows.rows[i] for i, layer in enumerate(layers)},
            offsets=offsets,
            token_ids=self._row_tokens(members, rows),
            positions=rows.positions,
            provenance=provenance,
            pooling=spec.pooling,
            index=np.array([self.places[u][0] for u in members], np.int64),
            perplexity=_perplexities(rows.nll) if spec.perplexity else None,
            token_nll=tuple(rows.nll or ()) if spec.token_nll else None,
            logits=None if rows.logits is None else np.concatenate(rows.logits),
            logit_ids=None if rows.logit_ids is None else np.concatenate(rows.logit_ids),
            logit_offsets=None if rows.logits is None else offsets_of([len(each) for each in rows.logits]),
        )
        return self._repeated(distinct, members)

    def _repeated(self, distinct: Activations, members: Sequence[int]) -> Activations:
        copies = [len(self.places[u]) for u in members]
        if max(copies) == 1:
            return distinct
        whole = distinct.select(np.repeat(np.arange(len(members)), copies))
        whole.index[:] = [place for u in members for place in self.places[u]]
        return whole

    def _row_tokens(self, members: Sequence[int], rows: HostRows) -> NDArray[np.int32]:
        token_ids = np.full(len(rows.positions), -1, np.int32)
        start = 0
        for u, count in zip(members, rows.counts, strict=True):
            positions = rows.positions[start : start + count]
            real = positions >= 0
            token_ids[start : start + count][real] = self.tokens[u].token_ids[positions[real]]
            start += int(count)
        return token_ids


def windows_of(
    prompts: Iterable[PromptLike],
    tokenizer: PromptTokenizer,
    spec: CaptureSpec,
    held: HeldBytes | None,
    *,
    cut: bool,
) -> Iterator[Window]:
    """Tokenise ``prompts`` and cut them into windows.

    With ``held`` what a window gives stays under ``ORDERED_BYTES``; ``cut`` leaves out the tokens
    behind the last chosen position, which nothing before them can see.
    """
    stream = enumerate(prompts)
    while batch := list(islice(stream, WINDOW_PROMPTS)):
        first = batch[0][0]
        read = [Prompt.of(value, index) for index, value in batch]
        tokens = tokenizer.encode(read, spec, first)
        chosen = [tokenizer.choose(each, spec, first + i) for i, each in enumerate(tokens)]
        for start, stop in _spans(_costs(tokens, chosen, spec, held)):
            yield _window(tokens[start:stop], chosen[start:stop], first + start, cut and not spec.exact)


def _costs(
    tokens: Sequence[Tokens], chosen: Sequence[NDArray[np.int32]], spec: CaptureSpec, held: HeldBytes | None
) -> list[int]:
    """Bytes that each prompt's results take on the host."""
    if held is None:
        return [0] * len(tokens)
    rows = [held.row * (len(each) if spec.pooling == "none" else 1) for each in chosen]
    logits = [held.logits * (len(each.token_ids) if spec.logits == "all" else 1) for each in tokens]
    return [row + logit for row, logit in zip(rows, logits, strict=True)]


def _spans(costs: Sequence[int]) -> Iterator[tuple[int, int]]:
    start, held = 0, 0
    for i, cost in enumerate(costs):
        if i > start and held + cost > ORDERED_BYTES:
            yield start, i
            start, held = i, 0
        held += cost
    yield start, len(costs)


def _window(tokens: Sequence[Tokens], chosen: Sequence[NDArray[np.int32]], first: int, cut: bool) -> Window:
    window = Window([], [], [])
    found: dict[bytes, int] = {}
    for i, (each, positions) in enumerate(zip(tokens, chosen, strict=True)):
        ids = each.token_ids[: positions[-1] + 1] if cut else each.token_ids
        key = tokens_digest(ids, positions)
        if key in found:
            window.places[found[key]].append(first + i)
            continue
        found[key] = len(window.runs)
        window.runs.append(TokenRun(ids, positions, first + i))
        window.tokens.append(each)
        window.places.append([first + i])
    return window


def _perplexities(nll: list[NDArray[np.float32]] | None) -> NDArray[np.float64]:
    return np.array([perplexity_of(each) for each in nll or ()], np.float64).reshape(-1, 3)


def perplexity_of(nll: NDArray[np.float32]) -> tuple[float, float, float]:
    """Mean, minimum and maximum perplexity of a prompt whose tokens cost ``nll`` [tokens - 1] nats.

    The mean is ``exp`` of the mean, as is usual; a prompt of one token predicts none: NaN.
    """
    if not len(nll):
        return (float("nan"),) * 3
    wide = nll.astype(np.float64)
    return float(np.exp(wide.mean())), float(np.exp(wide.min())), float(np.exp(wide.max()))
