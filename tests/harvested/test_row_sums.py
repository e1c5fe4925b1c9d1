"""Mean, deviation and norm in float64, the same however the rows were cut."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamtap.harvested import statistics
from streamtap.harvested.statistics import RowSums


def rows_of(n_rows: int, dtype: Any = np.float32, seed: int = 0, offset: float = 0.0) -> Any:
    return (np.random.default_rng(seed).standard_normal((2, n_rows, 3)) + offset).astype(dtype)


@settings(max_examples=60, deadline=None)
@given(counts=st.lists(st.integers(0, 7), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_merged_is_as_all_at_once(counts: list[int], seed: int) -> None:
    whole = rows_of(sum(counts), seed=seed)
    sums = RowSums.nothing(2, 3)
    for start, stop in zip(np.cumsum([0, *counts[:-1]]), np.cumsum(counts), strict=True):
        sums = sums.merged(RowSums.of(whole[:, start:stop]))

    assert sums.count == sum(counts)
    if not sums.count:
        assert not sums.std.any()
        assert not sums.mean_norm.any()
        return
    wide = whole.astype(np.float64)
    np.testing.assert_allclose(sums.mean, wide.mean(axis=1), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(sums.std, wide.std(axis=1), rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(sums.mean_norm, np.linalg.norm(wide, axis=2).mean(axis=1), rtol=1e-12)


def test_a_small_spread_around_a_large_mean_is_not_lost() -> None:
    rows = rows_of(5000, np.float64, offset=1e8)
    sums = RowSums.nothing(2, 3)
    for piece in np.array_split(rows, 50, axis=1):
        sums = sums.merged(RowSums.of(piece))

    np.testing.assert_allclose(sums.std, rows.std(axis=1), rtol=1e-8)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_narrow_rows_are_summed_in_float64(dtype: Any) -> None:
    rows = (rows_of(4000) * 100).astype(dtype)

    np.testing.assert_allclose(RowSums.of(rows).mean, rows.astype(np.float64).mean(axis=1), rtol=1e-10)
    assert RowSums.of(rows).mean.dtype == np.float64


def test_rows_are_widened_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, seen = rows_of(1000), []
    piece = RowSums._of_piece

    def counted(wide: Any) -> RowSums:
        seen.append(wide.shape[1])
        return piece(wide)

    whole = RowSums.of(rows)
    monkeypatch.setattr(statistics, "_PIECE_VALUES", 600)
    monkeypatch.setattr(RowSums, "_of_piece", staticmethod(counted))
    sums = RowSums.of(rows)

    assert seen == [100] * 10
    np.testing.assert_allclose(sums.std, whole.std, rtol=1e-12)


def test_what_is_given_is_not_changed() -> None:
    rows = rows_of(10, np.float64)
    before = rows.copy()
    RowSums.of(rows)

    assert np.array_equal(rows, before)


def test_the_same_order_gives_the_same_bits() -> None:
    parts = [RowSums.of(rows_of(100 + seed, seed=seed)) for seed in range(9)]

    def merged() -> bytes:
        sums = RowSums.nothing(2, 3)
        for part in parts:
            sums = sums.merged(part)
        return sums.mean.tobytes() + sums.squares.tobytes() + sums.norms.tobytes()

    assert merged() == merged()
