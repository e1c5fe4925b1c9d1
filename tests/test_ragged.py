from __future__ import annotations

import numpy as np

from streamtap.ragged import blocks, offsets_of, ranges


def test_offsets_begin_at_nothing_and_end_at_the_sum() -> None:
    assert offsets_of([3, 0, 2]).tolist() == [0, 3, 3, 5]
    assert offsets_of([]).tolist() == [0]
    assert offsets_of(np.array([1], np.int32)).dtype == np.int64


def test_ranges_are_the_rows_that_starts_and_counts_name() -> None:
    assert ranges(np.array([7, 0, 2]), np.array([2, 0, 3])).tolist() == [7, 8, 2, 3, 4]
    assert ranges(np.zeros(0, np.int64), np.zeros(0, np.int64)).tolist() == []


def test_blocks_add_up_to_no_more_than_asked_unless_one_is_more_alone() -> None:
    assert list(blocks(np.array([2, 2, 5, 1, 1, 1]), 4)) == [(0, 2), (2, 3), (3, 6)]
    assert list(blocks(np.array([9, 0, 0, 4]), 4)) == [(0, 1), (1, 4)]
    assert list(blocks(np.zeros(0, np.int64), 4)) == []
