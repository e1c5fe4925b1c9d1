"""Answers that an engine might give."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from streamtap.completion import Choice, Finished, Rows, TokenLog, Usage


class TwoLogs:
    """Log-probabilities of a prompt of two tokens."""

    def __len__(self) -> int:
        return 2

    def at(self, position: int) -> TokenLog:
        if position == 0:
            return TokenLog(5, "a", 0, None)
        return TokenLog(6, "b", 1, -2.0, 3, ((7, "c", -0.5), (8, "d", float("-inf"))))


def rows_of(layers: tuple[int, ...], positions: list[int], hidden: int = 2, dtype: str = "bfloat16") -> Rows:
    count = len(layers) * len(positions) * hidden
    kind = np.float32 if dtype == "float32" else ml_dtypes.bfloat16
    values = (np.arange(count) / 4).astype(kind).reshape(len(layers), len(positions), hidden)
    places = np.array(positions, np.int32)
    return Rows(layers, values, places, places + 100)


@pytest.fixture
def rows() -> Callable[..., Rows]:
    return rows_of


@pytest.fixture
def plain() -> Finished:
    return Finished((Choice(0, " blue", (1, 2, 3, 4, 5), (6,), "length"),), Usage(5, 1))


@pytest.fixture
def captured() -> Finished:
    """Two prompt tokens and two drawn: rows at positions 0, 1 and 2, of layers 1 and 3."""
    choice = Choice(0, "xy", (5, 6), (7, 8), "stop", "z", rows=rows_of((1, 3), [0, 1, 2]))
    return Finished((choice,), Usage(2, 2))


@pytest.fixture
def batched() -> Finished:
    """Two prompts, of 2 and 1 tokens, with one drawn each, and the last row alone."""
    choices = (
        Choice(0, "x", (5, 6), (7,), "length", rows=rows_of((1, 3), [1])),
        Choice(1, "y", (5,), (7,), "length", rows=rows_of((1, 3), [0])),
    )
    return Finished(choices, Usage(3, 2))


@pytest.fixture
def logged() -> Finished:
    """Echo with log-probabilities: the first token has none."""
    logs = (
        TokenLog(5, "a", 0, None),
        TokenLog(6, "b", 1, -2.0, 3, ((7, "c", -0.5), (9, "c", -0.7))),
        TokenLog(8, "d", 2, float("-inf"), 9),
    )
    return Finished((Choice(0, "abd", (5, 6), (8,), "stop", 8, logs, TwoLogs()),), Usage(2, 1))
