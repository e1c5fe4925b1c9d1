"""Position specs: which tokens have a row, and what is refused."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamtap.errors import InvalidPositions
from streamtap.positions import canonical_positions, check_positions, choose_positions, is_own_to_prompt

#: The same examples in every run, however busy the machine.
STEADY = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])

IDS = np.array([0, 5, 6, 7, 0, 8, 1], np.int32)
SPECIAL = np.array([0, 1], np.int32)


def is_even(token_ids: Any) -> Any:
    return token_ids % 2 == 0


CHOSEN: list[tuple[Any, list[int], list[int]]] = [
    ("all", [0, 1, 2, 3, 4, 5, 6], [1, 2, 3, 5]),
    ("last", [6], [5]),
    ("-3:", [4, 5, 6], [5]),
    (":2", [0, 1], [1]),
    ("1:-1", [1, 2, 3, 4, 5], [1, 2, 3, 5]),
    (":", [0, 1, 2, 3, 4, 5, 6], [1, 2, 3, 5]),
    ("-100:3", [0, 1, 2], [1, 2]),
    (3, [3], [3]),
    (-2, [5], [5]),
    ([-1, 2], [2, 6], [2]),
    ((5,), [5], [5]),
    ({1, 2}, [1, 2], [1, 2]),
    (np.array([3, 1]), [1, 3], [1, 3]),
    (np.int32(2), [2], [2]),
    (is_even, [0, 2, 4, 5], [2, 5]),
    (lambda ids: [True] + [False] * 5 + [True], [0, 6], []),
]


@pytest.mark.parametrize(("spec", "positions", "without_special"), CHOSEN, ids=lambda value: str(value)[:20])
def test_a_spec_chooses_its_positions(spec: Any, positions: list[int], without_special: list[int]) -> None:
    check_positions(spec)

    found = choose_positions(spec, IDS)

    assert found.tolist() == positions
    assert found.dtype == np.int32
    if without_special:
        assert choose_positions(spec, IDS, excluded_ids=SPECIAL).tolist() == without_special
    else:
        with pytest.raises(InvalidPositions, match="prompt 3: .* none of its 7 tokens"):
            choose_positions(spec, IDS, excluded_ids=SPECIAL, index=3)


@pytest.mark.parametrize(
    "spec",
    [
        "", "first", "Last", "-", "-:", "1:2:3", "1:x", "role:", "5", True, 1.0, None, [], [1.0], [True], ["1"],
        np.array([True, False]), np.array(3), np.array([[1, 2]]), np.array([], int), (n for n in (1, 2)),
    ],
    ids=lambda value: repr(value)[:20],
)  # fmt: skip
def test_what_can_mean_nothing_is_refused_at_once(spec: Any) -> None:
    with pytest.raises(InvalidPositions, match="is not understood; write 'all'"):
        check_positions(spec)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (7, "position 7 is outside its 7 tokens, 0 to 6"),
        ([0, -8], "position -8 is outside"),
        (2**70, "outside"),
        ([6, -1], "name one token twice"),
        ([2, 2], "name one token twice"),
        ("5:5", "leaves none of its 7 tokens"),
        ("9:", "leaves none"),
        (lambda ids: np.zeros(7, bool), "of the mask function leaves none"),
        (lambda ids: np.ones(6, bool), r"booleans of shape \(7,\); got bool of shape \(6,\)"),
        (lambda ids: np.ones((1, 7), bool), r"shape \(1, 7\)"),
        (lambda ids: np.arange(7), "got int64"),
        (lambda ids: True, r"shape \(\)"),
        ("role:user", "leaves none"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_does_not_fit_the_prompt_is_refused_by_its_index(spec: Any, reason: str) -> None:
    check_positions(spec)

    with pytest.raises(InvalidPositions, match=f"prompt 12: .*{reason}"):
        choose_positions(spec, IDS, index=12)


def test_roles_are_looked_up_by_the_caller() -> None:
    found = choose_positions("role:user", IDS, role_positions=np.array([1, 4], np.int32), excluded_ids=SPECIAL)

    assert found.tolist() == [1]


@pytest.mark.parametrize(("spec", "own"), [(is_even, True), ("role:user", True), ("last", False), ([1], False)])
def test_only_masks_and_roles_are_the_prompts_own(spec: Any, own: bool) -> None:
    assert is_own_to_prompt(spec) is own


def test_specs_that_choose_alike_are_written_alike() -> None:
    assert canonical_positions("-5:") == "-5:"
    assert canonical_positions(3) == canonical_positions([3]) == canonical_positions(np.array([3])) == "3"
    assert canonical_positions((1, -2)) == canonical_positions(np.array([1, -2])) == "1,-2"
    assert canonical_positions(is_even) == canonical_positions("role:user")


@STEADY
@given(st.integers(1, 12), st.integers(-15, 15) | st.none(), st.integers(-15, 15) | st.none())
def test_ranges_are_pythons(n: int, start: int | None, stop: int | None) -> None:
    spec = f"{'' if start is None else start}:{'' if stop is None else stop}"
    expected = list(range(n))[start:stop]
    check_positions(spec)

    if expected:
        assert choose_positions(spec, np.arange(n, dtype=np.int32)).tolist() == expected
    else:
        with pytest.raises(InvalidPositions, match="none"):
            choose_positions(spec, np.arange(n, dtype=np.int32))


@STEADY
@given(st.text("0123456789-:l", max_size=6))
def test_any_text_is_refused_at_once_or_can_be_used(text: str) -> None:
    chosen = IDS
    with suppress(InvalidPositions):  # any other error is a fault
        check_positions(text)
        chosen = choose_positions(text, IDS)
    assert len(chosen)
