"""What a fake model says: one letter after another, each a function of all tokens before it.

The likeliest token after any tokens is a letter from a to w; the r-th likeliest, from 0, is the token r further on in
the vocabulary, with probability ``2 ** -(r + 1)``.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

from streamtap.completion import Sampling, TokenLog
from streamtap.testing.characters import SPECIAL_IDS, UNKNOWN, VOCABULARY, CharacterTokenizer

_FIRST_LETTER: int = CharacterTokenizer()("a", add_special_tokens=False)["input_ids"][0]
_LETTERS = 23
#: A draw takes one of so many likeliest tokens, so that it too is a letter.
_DRAWN_FROM = 4


def text_of(token_ids: Sequence[int]) -> str:
    """The characters of the tokens; special ones are none, an unknown one is a question mark."""
    return "".join(character_of(token) for token in token_ids)


def character_of(token: int) -> str:
    """The text of one token."""
    if token == UNKNOWN:
        return "?"
    return "" if token in SPECIAL_IDS else chr(token - len(SPECIAL_IDS) + ord(" "))


def next_token(before: Sequence[int], sampling: Sampling, sample: int) -> int:
    """The token after ``before``: the likeliest where temperature is 0, else a draw by seed and ``sample``."""
    rank = 0
    if sampling.temperature:
        rank = zlib.crc32(f"{sampling.seed} {sample}".encode(), _state(before)) % _DRAWN_FROM
    return _likeliest(before) + rank


def written(token_ids: Sequence[int], n_tokens: int, sampling: Sampling | None = None, sample: int = 0) -> list[int]:
    """The ``n_tokens`` ids that follow ``token_ids``, for a test to compare with; greedy unless told how to draw."""
    ids = list(token_ids)
    for _ in range(n_tokens):
        ids.append(next_token(ids, sampling or Sampling(temperature=0), sample))
    return ids[len(token_ids) :]


def log_of(token: int, before: Sequence[int], n_top: int, offset: int) -> TokenLog:
    """The log-probability of ``token`` after ``before``, with the ``n_top`` likeliest; -1 is all of them."""
    if not before:
        return TokenLog(token, character_of(token), offset, None)
    first = _likeliest(before)
    rank = (token - first) % VOCABULARY
    ranks = range(VOCABULARY if n_top < 0 else n_top)
    best = [((first + r) % VOCABULARY, _logprob(r)) for r in ranks]
    top = tuple((each, character_of(each), logprob) for each, logprob in best)
    return TokenLog(token, character_of(token), offset, _logprob(rank), rank + 1, top)


def _logprob(rank: int) -> float:
    return -(rank + 1) * math.log(2)


def _likeliest(before: Sequence[int]) -> int:
    return _FIRST_LETTER + _state(before) % _LETTERS


def _state(token_ids: Sequence[int]) -> int:
    return zlib.crc32(",".join(map(str, token_ids)).encode())
