"""Ragged rows: counts to offsets, and back to the rows they name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def offsets_of(counts: Sequence[int] | NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """Where each of ``counts`` [n] begins and the last one ends, int64 [n + 1]."""
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def ranges(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The numbers ``starts[i]`` to ``starts[i] + counts[i]`` of every i, one after the other: int64 [sum of counts]."""
    offsets = offsets_of(counts)
    return np.repeat(starts - offsets[:-1], counts) + np.arange(offsets[-1], dtype=np.int64)


def blocks(counts: NDArray[np.int64], most: int) -> Iterator[tuple[int, int]]:
    """Stretches [start, stop) of ``counts`` [n] that add up to at most ``most`` each, or are one alone."""
    offsets, start = offsets_of(counts), 0
    while start < len(counts):
        stop = max(start + 1, int(np.searchsorted(offsets, offsets[start] + most, side="right")) - 1)
        yield start, stop
        start = stop
