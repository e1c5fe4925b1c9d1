"""The prompts that the extraction benchmarks run: text of known lengths, the same on every machine."""

from __future__ import annotations

from typing import Any

import numpy as np

from streamtap.workbench.statements import load_statements

SHORTEST, LONGEST, COUNT = 8, 200, 200
PREAMBLE_TOKENS, TAIL_TOKENS = 120, 20


def ragged(tokenizer: Any, count: int = COUNT, longest: int = LONGEST, seed: int = 0) -> list[str]:
    """``count`` distinct texts of 8 to ``longest`` tokens, evenly spread, in a shuffled order."""
    order = np.random.default_rng(seed)
    lengths = np.linspace(SHORTEST, longest, count).round().astype(int)
    return [_text(tokenizer, int(length), order) for length in order.permutation(lengths)]


def with_preamble(tokenizer: Any, count: int = COUNT, seed: int = 1) -> list[str]:
    """``count`` texts that begin with the same 120 tokens and end in about 20 of their own."""
    order = np.random.default_rng(seed)
    preamble = _text(tokenizer, PREAMBLE_TOKENS, order)
    tails = order.integers(TAIL_TOKENS - 5, TAIL_TOKENS + 6, count)
    return [preamble + " " + _text(tokenizer, int(tail), order) for tail in tails]


def short(count: int, seed: int = 2) -> list[str]:
    """``count`` distinct short texts, for look-ups that run no model."""
    texts = load_statements().texts
    order = np.random.default_rng(seed)
    return [f"{i}. {texts[int(order.integers(len(texts)))]}" for i in range(count)]


def _text(tokenizer: Any, tokens: int, order: np.random.Generator) -> str:
    texts = load_statements().texts
    ids: list[int] = []
    while len(ids) < tokens:
        ids += tokenizer(" " + texts[int(order.integers(len(texts)))], add_special_tokens=False)["input_ids"]
    return str(tokenizer.decode(ids[:tokens])).strip()
