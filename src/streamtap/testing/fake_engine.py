"""An engine without torch or a model: rows made of token ids by a formula.

Every value depends on the model's identity, the prompt's tokens so far, the layer and the place in
the row, so whatever is mixed up on the way to a reader shows. It counts what it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import islice
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from streamtap.activations import Activations, Provenance, in_asked_order
from streamtap.engines.tokenizing import PromptTokenizer, Tokens
from streamtap.errors import InvalidInput
from streamtap.fingerprint import fingerprint
from streamtap.layers import resolve_layers
from streamtap.pooling import ONE_TOKEN, pool
from streamtap.ragged import offsets_of
from streamtap.spec import CaptureSpec, Prompt, PromptLike
from streamtap.testing.characters import VOCABULARY, CharacterTokenizer

_WINDOW_BATCHES = 4
_WORDS = (1 << 64) - 1
_ODD = 0x9E3779B97F4A7C15
#: Which of a prompt's streams of numbers a value is taken from, so that no two agree.
_ROWS, _LOSSES, _LOGITS = 1, 2, 3

Words = NDArray[np.uint64]
TokenIds = Sequence[int] | NDArray[np.int32]


@dataclass(frozen=True)
class FakeRun:
    """One prompt that went through the engine, and what was asked for it."""

    token_ids: tuple[int, ...]
    layers: tuple[int, ...]
    scores: tuple[str, ...]


@dataclass(eq=False)
class FakeEngine:
    """Answers as a model would, by arithmetic.

    Args:
        n_layers: Blocks.
        hidden: Width of a row.
        dtype: Of the rows: ``"float32"``, ``"float64"``, ``"float16"`` or ``"bfloat16"``.
        batch_size: Prompts in a batch.
        context_tokens: Longest prompt.
        special_ids: Token ids beside the tokenizer's own that count as special.
        named: Other fields of ``Provenance``, such as ``commit``, ``tokenizer`` or ``quantization``.
        before_batch: Called with each batch's number before it is made; what it raises ends the run.
    """

    n_layers: int = 4
    hidden: int = 8
    dtype: str = "float32"
    batch_size: int = 4
    context_tokens: int = 64
    special_ids: Sequence[int] = ()
    named: Mapping[str, Any] = field(default_factory=dict)
    before_batch: Callable[[int], None] | None = None
    runs: list[FakeRun] = field(default_factory=list)
    batches: int = 0
    closed: bool = False

    def __post_init__(self) -> None:
        """Name the model and make its tokenizer."""
        fields = {"model": "fake", "commit": "fake-1", "tokenizer": "characters", "engine": "fake", **self.named}
        self.provenance = Provenance(**fields, dtype=self.dtype, n_layers=self.n_layers, hidden=self.hidden)
        self.tokenizer = PromptTokenizer(
            CharacterTokenizer(),
            context_length=self.context_tokens,
            vocabulary=VOCABULARY,
            special_ids=self.special_ids,
        )

    def capture(
        self, prompts: Iterable[PromptLike], spec: CaptureSpec, *, ordered: bool = True
    ) -> Iterator[Activations]:
        """Rows of ``prompts``; see ``Engine.capture``. Unordered batches come longest prompts first."""
        layers = resolve_layers(spec.layers, self.n_layers)
        if not layers and not spec.needs_head:
            raise InvalidInput("nothing was asked for: no layers, and neither perplexity nor logits.")
        stream = enumerate(prompts)
        while window := list(islice(stream, self.batch_size * _WINDOW_BATCHES)):
            parts = self._window(window, spec, layers)
            if ordered:
                yield in_asked_order(list(parts))
            else:
                yield from parts

    def close(self) -> None:
        """Say that it was closed."""
        self.closed = True

    def rows(self, token_ids: TokenIds, layer: int, *, exact: bool = False) -> NDArray[Any]:
        """Every row of one prompt at ``layer``, [tokens, hidden]; rounding is made visible: ``exact`` rows differ."""
        first = (self._seed * 64 + layer) * 2 + exact
        values = _numbers(_states(token_ids), _ROWS, first * self.hidden, self.hidden)
        return values.astype(ml_dtypes.bfloat16 if self.dtype == "bfloat16" else self.dtype)

    def losses(self, token_ids: TokenIds) -> NDArray[np.float32]:
        """Negative log-likelihood of every token but the first, float32 [tokens - 1], in nats."""
        values = _numbers(_states(token_ids)[1:], _LOSSES, self._seed, 1)
        return (2 + values[:, 0]).astype(np.float32)

    def perplexity(self, token_ids: TokenIds) -> NDArray[np.float64]:
        """Mean, minimum and maximum perplexity, float64 [3]; NaN for one token."""
        losses = self.losses(token_ids).astype(np.float64)
        if not len(losses):
            return np.full(3, np.nan)
        return np.exp([losses.mean(), losses.min(), losses.max()])

    def logits(self, token_ids: TokenIds) -> NDArray[np.float32]:
        """Logits at every position, float32 [tokens, vocabulary]."""
        return _numbers(_states(token_ids), _LOGITS, self._seed, VOCABULARY).astype(np.float32)

    @cached_property
    def _seed(self) -> int:
        about = self.provenance
        return int(fingerprint({"commit": about.commit, "quantization": about.quantization})[:8], 16)

    def _window(
        self, window: Sequence[tuple[int, PromptLike]], spec: CaptureSpec, layers: tuple[int, ...]
    ) -> Iterator[Activations]:
        first = window[0][0]
        read = [Prompt.of(value, index) for index, value in window]
        tokens = self.tokenizer.encode(read, spec, first)
        chosen = [self.tokenizer.choose(each, spec, first + i) for i, each in enumerate(tokens)]
        order = sorted(range(len(tokens)), key=lambda i: -len(tokens[i].token_ids))
        for start in range(0, len(order), self.batch_size):
            members = order[start : start + self.batch_size]
            if self.before_batch is not None:
                self.before_batch(self.batches)
            self.batches += 1
            self.runs += [FakeRun(tuple(tokens[i].token_ids.tolist()), layers, _scores_of(spec)) for i in members]
            batch = self._batch([tokens[i] for i in members], [chosen[i] for i in members], spec, layers)
            batch.index[:] = [first + i for i in members]
            yield batch

    def _batch(
        self,
        tokens: Sequence[Tokens],
        chosen: Sequence[NDArray[np.int32]],
        spec: CaptureSpec,
        layers: tuple[int, ...],
    ) -> Activations:
        ids = [each.token_ids for each in tokens]
        offsets = offsets_of([len(each) for each in chosen])
        acts = {layer: self._picked(ids, chosen, layer, spec.exact) for layer in layers}
        places = np.concatenate(chosen)
        held = np.concatenate([each[some] for each, some in zip(ids, chosen, strict=True)])
        if spec.pooling != "none":
            acts = {layer: pool(rows, offsets, spec.pooling) for layer, rows in acts.items()}
            held, places = _pooled_places(held, places, offsets, spec.pooling)
            offsets = np.arange(len(ids) + 1)
        acts = {layer: _narrow(rows, spec) for layer, rows in acts.items()}
        logits, logit_ids, logit_offsets = self._asked_logits(ids, spec)
        return Activations(
            acts=acts,
            offsets=offsets,
            token_ids=held,
            positions=places,
            provenance=self.provenance,
            pooling=spec.pooling,
            index=np.zeros(len(ids), np.int64),
            perplexity=np.array([self.perplexity(each) for each in ids]) if spec.perplexity else None,
            token_nll=tuple(self.losses(each) for each in ids) if spec.token_nll else None,
            logits=logits,
            logit_ids=logit_ids,
            logit_offsets=logit_offsets,
        )

    def _picked(
        self, ids: Sequence[NDArray[np.int32]], chosen: Sequence[NDArray[np.int32]], layer: int, exact: bool
    ) -> NDArray[Any]:
        pairs = zip(ids, chosen, strict=True)
        return np.concatenate([self.rows(each, layer, exact=exact)[some] for each, some in pairs])

    def _asked_logits(self, ids: Sequence[NDArray[np.int32]], spec: CaptureSpec) -> tuple[Any, Any, Any]:
        if spec.logits is None:
            return None, None, None
        found = [self.logits(each) if spec.logits == "all" else self.logits(each)[-1:] for each in ids]
        values, offsets = np.concatenate(found), offsets_of([len(each) for each in found])
        if spec.logit_top_k is None:
            return values, None, offsets
        order = np.argsort(-values, axis=1, kind="stable")[:, : spec.logit_top_k]
        return np.take_along_axis(values, order, axis=1), order.astype(np.int32), offsets


def _narrow(rows: NDArray[Any], spec: CaptureSpec) -> NDArray[Any]:
    if spec.projection is not None:
        return rows.astype(np.float32) @ spec.projection.directions.T
    return rows if spec.dtype is None else rows.astype(ml_dtypes.bfloat16 if spec.dtype == "bfloat16" else spec.dtype)


def _scores_of(spec: CaptureSpec) -> tuple[str, ...]:
    asked = {"perplexity": spec.perplexity, "token_nll": spec.token_nll, "logits": spec.logits is not None}
    return tuple(name for name, wanted in asked.items() if wanted)


def _states(token_ids: TokenIds) -> Words:
    """One word a token, uint64 [tokens], that depends on all tokens up to it."""
    return _states_of(tuple(int(token) for token in token_ids))


@lru_cache(maxsize=64)
def _states_of(token_ids: tuple[int, ...]) -> Words:
    state, states = 1, []
    for token in token_ids:
        state = _mixed(state + token + 1)
        states.append(state)
    return np.array(states, np.uint64)


def _numbers(states: Words, stream: int, first: int, n_columns: int) -> NDArray[np.float64]:
    """Numbers in [-1, 1), float64 [states, columns]; the columns are numbered from ``first`` on."""
    words = states[:, None] ^ _keys(stream, first, n_columns)[None, :]
    words *= np.uint64(_ODD)
    words ^= words >> np.uint64(32)
    words *= np.uint64(_ODD)
    return (words >> np.uint64(11)).astype(np.float64) / (1 << 52) - 1


@lru_cache(maxsize=256)
def _keys(stream: int, first: int, n_columns: int) -> Words:
    return np.array([_mixed(4 * column + stream) for column in range(first, first + n_columns)], np.uint64)


def _mixed(word: int) -> int:
    """A word whose every bit depends on every bit of ``word``."""
    word = (word * _ODD) & _WORDS
    word = ((word ^ (word >> 32)) * _ODD) & _WORDS
    return word ^ (word >> 29)


def _pooled_places(
    held: NDArray[np.int32], places: NDArray[np.int32], offsets: NDArray[np.int64], pooling: str
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Token ids and positions of pooled rows: a mean stands on none."""
    if pooling not in ONE_TOKEN:
        none = np.full(len(offsets) - 1, -1, np.int32)
        return none, none
    picks = offsets[1:] - 1 if pooling == "last_token" else offsets[:-1]
    return held[picks], places[picks]
