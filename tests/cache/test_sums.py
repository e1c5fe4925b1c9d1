"""What a checksum notices."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamtap.cache.sums import row_sums, token_sums


@given(st.integers(1, 40), st.integers(0, 10**9), st.data())
def test_every_flipped_bit_changes_the_sum_of_its_row_alone(row_bytes: int, first: int, data: st.DataObject) -> None:
    values = np.random.default_rng(row_bytes).integers(0, 256, (3, row_bytes), np.uint8)
    rows = np.arange(first, first + 3)
    before = row_sums(values, rows)
    bit = data.draw(st.integers(0, row_bytes * 8 - 1))
    values[1, bit // 8] ^= 1 << bit % 8
    assert (row_sums(values, rows) != before).tolist() == [False, True, False]


def test_rows_of_zeros_have_sums_that_differ_and_are_not_zero() -> None:
    sums = row_sums(np.zeros((1000, 16), np.float32), np.arange(1000))
    assert len(set(sums.tolist())) == 1000
    assert 0 not in sums


def test_the_sum_is_the_documented_one() -> None:
    values = np.array([[3, 2**64 - 1]], "<u8")
    expected = (3 + 2**64 - 1 + 6 * 0x9E3779B97F4A7C15) % 2**64
    assert row_sums(values, np.array([5])).tolist() == [expected]


@pytest.mark.parametrize("column", [0, 1])
def test_token_ids_and_positions_are_covered(column: int) -> None:
    pair = [np.array([7, 8], np.int32), np.array([0, 1], np.int32)]
    before = token_sums(pair[0], pair[1], np.arange(2))
    pair[column] = pair[column] ^ np.int32(4)
    assert (token_sums(pair[0], pair[1], np.arange(2)) != before).all()


def test_no_rows() -> None:
    assert row_sums(np.zeros((0, 3), np.float32), np.zeros(0, np.int64)).shape == (0,)
