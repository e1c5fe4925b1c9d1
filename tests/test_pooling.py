"""Pooling ragged rows, against a loop over prompts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamtap.errors import InvalidInput
from streamtap.pooling import ONE_TOKEN, POOLINGS, check_pooling, pool

#: The same examples in every run, however busy the machine.
STEADY = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])

COUNTS = [1, 5, 2, 9]
OFFSETS = np.concatenate([[0], np.cumsum(COUNTS)])
ROWS = np.random.default_rng(0).normal(size=(17, 4))
BY_HAND: dict[str, Callable[[Any], Any]] = {
    "last_token": lambda rows: rows[-1],
    "first_token": lambda rows: rows[0],
    "mean": lambda rows: rows.mean(0),
    "max": lambda rows: rows.max(0),
}


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("pooling", BY_HAND)
def test_each_prompt_is_pooled_alone_and_rounded_once(pooling: str, dtype: Any) -> None:
    rows = ROWS.astype(dtype)
    parts = [rows[start:stop].astype(np.float64) for start, stop in pairwise(OFFSETS)]
    expected = np.stack([BY_HAND[pooling](part) for part in parts])

    pooled = pool(rows, OFFSETS, pooling)

    assert pooled.dtype == dtype
    assert pooled.shape == (4, 4)
    if pooling != "mean":
        assert np.array_equal(pooled.astype(np.float64), expected)
    half_a_unit = {8: 1e-15, 4: 1e-6}.get(rows.dtype.itemsize, {ml_dtypes.bfloat16: 2.0**-8}.get(dtype, 2.0**-11))
    np.testing.assert_allclose(pooled.astype(np.float64), expected, rtol=1.01 * half_a_unit, atol=1e-7)


def test_a_mean_is_summed_wider_than_it_is_kept() -> None:
    rows = np.full((4096, 1), 1.5, np.float16)
    rows[0] = 60000  # in float16 the sum would be infinite

    assert pool(rows, np.array([0, 4096]), "mean")[0, 0] == np.float16((60000 + 4095 * 1.5) / 4096)


def test_none_keeps_the_rows_themselves() -> None:
    assert pool(ROWS, OFFSETS, "none") is ROWS


@pytest.mark.parametrize("pooling", BY_HAND)
def test_a_prompt_without_rows_is_refused_by_its_place(pooling: str) -> None:
    with pytest.raises(InvalidInput, match="prompt 2 has no rows"):
        pool(ROWS, np.array([0, 3, 5, 5, 17]), pooling)


@pytest.mark.parametrize("pooling", BY_HAND)
def test_no_prompt_gives_no_row(pooling: str) -> None:
    assert pool(ROWS[:0], np.array([0]), pooling).shape == (0, 4)


@pytest.mark.parametrize("pooling", ["median", "", "Mean", None, "last"])
def test_an_unknown_pooling_is_refused_with_the_known_ones(pooling: Any) -> None:
    for refuse in (check_pooling, lambda name: pool(ROWS, OFFSETS, name)):
        with pytest.raises(InvalidInput, match=f"last_token, first_token, mean, max, none; got {pooling!r}"):
            refuse(pooling)


def test_the_names_are_those_of_the_seeds() -> None:
    assert POOLINGS == ("last_token", "first_token", "mean", "max", "none")
    assert set(ONE_TOKEN) < set(POOLINGS)
    assert [check_pooling(name) for name in POOLINGS] == list(POOLINGS)


@STEADY
@given(st.lists(st.integers(1, 6), min_size=1, max_size=6))
def test_no_row_of_another_prompt_counts(counts: list[int]) -> None:
    offsets = np.concatenate([[0], np.cumsum(counts)])
    rows = np.repeat(np.arange(len(counts), dtype=np.float32), counts)[:, None]

    for pooling in BY_HAND:
        assert pool(rows, offsets, pooling)[:, 0].tolist() == list(range(len(counts)))
