"""Wilson's interval against its definition."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamtap.errors import InvalidInput
from streamtap.probes.intervals import Z_95, wilson


@given(st.integers(1, 3000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_the_ends_are_the_proportions_just_not_rejected(case: tuple[int, int]) -> None:
    correct, n = case
    low, high = wilson(correct, n)
    assert 0 <= low <= correct / n <= high <= 1
    # Wilson's definition: (share - p)^2 = z^2 p (1 - p) / n at both ends.
    for end in (low, high):
        if 0 < end < 1:
            assert (correct / n - end) ** 2 == pytest.approx(Z_95**2 * end * (1 - end) / n, abs=1e-12)


def test_a_known_value() -> None:
    assert wilson(8, 10) == pytest.approx((0.4901625, 0.9433178), abs=1e-6)
    assert wilson(10, 10)[1] == 1.0
    assert wilson(0, 10)[0] == 0.0


@pytest.mark.parametrize("case", [(0, 0), (-1, 5), (6, 5)])
def test_no_proportion(case: tuple[int, int]) -> None:
    with pytest.raises(InvalidInput, match="a proportion needs"):
        wilson(*case)
