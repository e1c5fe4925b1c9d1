"""Checksums of rows, quick enough to be checked at every read.

A row's sum is its bytes, read as little-endian words, added up modulo 2⁶⁴, plus its number in
the part times an odd constant. A flipped bit changes it by a power of two; a row of zeros that
were never written, or of another place, misses the second term.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

# 2⁶⁴ divided by the golden ratio, made odd: neighbouring rows get sums that share no pattern.
ROW_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def row_sums(values: NDArray[Any], rows: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Sums uint64 [rows] of contiguous ``values`` [rows, width], whose numbers in the part are ``rows``."""
    return word_sums(values) + stamps(rows)


def word_sums(values: NDArray[Any]) -> NDArray[np.uint64]:
    """The words of each row of contiguous ``values`` [rows, width], added up: uint64 [rows]."""
    data = values.view(np.uint8)
    step = next(step for step in (8, 4, 2, 1) if data.shape[1] % step == 0)
    total: NDArray[np.uint64] = data.view(f"<u{step}").sum(axis=1, dtype=np.uint64)
    return total


def stamps(rows: NDArray[np.int64]) -> NDArray[np.uint64]:
    """What each row's number adds to its sum: uint64 [rows]."""
    return (rows + 1).astype(np.uint64) * ROW_FACTOR


def token_sums(
    token_ids: NDArray[np.int32], positions: NDArray[np.int32], rows: NDArray[np.int64]
) -> NDArray[np.uint64]:
    """Sums uint64 [rows] of each row's token id and position, both int32 [rows]."""
    return token_words(token_ids, positions) + stamps(rows)


def token_words(token_ids: NDArray[np.int32], positions: NDArray[np.int32]) -> NDArray[np.uint64]:
    """Token id and position of each row as one word, the id in the lower half: uint64 [rows]."""
    upper = positions.astype(np.uint32).astype(np.uint64) << np.uint64(32)
    return upper | token_ids.astype(np.uint32)
