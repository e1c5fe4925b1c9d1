"""Splits keep groups whole and labels in proportion, and know rows by id."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamtap.errors import InvalidInput, InvalidRows
from streamtap.probes.splits import PARTS, Split, grouped_split


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=12, max_size=60), st.integers(0, 99))
def test_every_row_once_every_group_whole(sizes: list[int], seed: int) -> None:
    groups = np.repeat(np.arange(len(sizes)), sizes)
    labels = groups % 2
    split = grouped_split(groups, labels, random_state=seed)
    parts = [getattr(split, part) for part in PARTS]
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(groups)))
    held = [set(groups[part].tolist()) for part in parts]
    assert not held[0] & held[1]
    assert not held[1] & held[2]
    assert not held[0] & held[2]
    assert all(set(labels[part].tolist()) == {0, 1} for part in parts)


def test_shares_and_labels_are_met_closely() -> None:
    groups = np.arange(400) // 4
    labels = np.random.default_rng(0).random(400) < 0.2
    split = grouped_split(groups, labels)
    for part, share in zip(PARTS, (0.55, 0.2, 0.25), strict=True):
        ids = getattr(split, part)
        assert len(ids) == pytest.approx(400 * share, abs=4)
        assert labels[ids].mean() == pytest.approx(labels.mean(), abs=0.03)


def test_the_same_twice_and_another_with_another_seed() -> None:
    groups, labels = np.arange(60) // 2, np.arange(60) % 2
    first, again, other = (grouped_split(groups, labels, random_state=seed) for seed in (1, 1, 2))
    assert all(np.array_equal(getattr(first, part), getattr(again, part)) for part in PARTS)
    assert not np.array_equal(first.test, other.test)


@pytest.mark.parametrize("group", [lambda i: f"fact {i // 3}", lambda i: (i // 3, "x"), lambda i: i // 3])
def test_permuted_rows_split_into_the_same_ids(group: Any) -> None:
    ids = np.arange(90) * 7 + 1000
    groups, labels = [group(i) for i in range(90)], np.arange(90) % 2
    order = np.random.default_rng(3).permutation(90)
    straight = grouped_split(groups, labels, row_ids=ids)
    permuted = grouped_split([groups[i] for i in order], labels[order], row_ids=ids[order])
    table = ids[order]
    for part in PARTS:
        assert np.array_equal(getattr(straight, part), getattr(permuted, part))
        # Ids find their rows wherever they went.
        assert table[straight.places(part, table)].tolist() == getattr(straight, part).tolist()


def test_test_rows_in_a_fit_are_refused() -> None:
    split = grouped_split(range(40), np.arange(40) % 2)
    split.check_training(np.concatenate([split.train, split.validation]))
    with pytest.raises(InvalidRows, match=f"1 rows to be fitted on are test rows, the first is {split.test[2]}"):
        split.check_training([*split.train, split.test[2]])


def test_an_overlap_is_refused() -> None:
    with pytest.raises(InvalidRows, match="row 2 is in the split more than once"):
        Split(np.array([0, 1, 2]), np.array([3]), np.array([2, 4]))


def test_a_table_that_lacks_a_row() -> None:
    split = grouped_split(range(40), np.arange(40) % 2)
    with pytest.raises(InvalidRows, match="the table lacks row 39 of the split's"):
        [split.places(part, np.arange(39)) for part in PARTS]


@pytest.mark.parametrize(
    ("groups", "labels", "kwargs", "error", "message"),
    [
        (np.arange(40) % 2, np.arange(40) % 2, {}, InvalidRows, "at least 3 groups; one label is in 1 of 2"),
        (range(10), [0, 0, 0, 0, 0, 0, 0, 0, 1, 1], {}, InvalidRows, "one label is in 2 of 10"),
        (range(10), [0, 1] * 4, {}, InvalidRows, "for each of the 10 rows; got 8"),
        (range(10), [0, 1] * 5, {"test": 0.9, "validation": 0.2}, InvalidInput, "together below 1"),
        (range(10), [0, 1] * 5, {"validation": 0.0}, InvalidInput, "must be above 0"),
        (range(10), [0, 1] * 5, {"row_ids": [0] * 10}, InvalidRows, "some occur twice"),
        (range(10), [0, 1] * 5, {"row_ids": range(9)}, InvalidRows, "got 9 and 10"),
    ],
)
def test_impossible_splits(groups: Any, labels: Any, kwargs: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        grouped_split(groups, labels, **kwargs)
