"""How many rows a capture may come to."""

from __future__ import annotations

import numpy as np
import pytest

from streamtap.completion import CaptureAsk, CapturedPositions, SteeringVector
from streamtap.errors import InvalidPositions
from streamtap.wire.counted import check_positions, check_steered_positions, counted_positions, fed_positions


def test_the_last_token_is_never_fed_back() -> None:
    assert [fed_positions(6, max_tokens) for max_tokens in (0, 1, 5)] == [6, 6, 10]


@pytest.mark.parametrize(
    ("positions", "counts"),
    [("all", [6, 6, 10]), ("last", [1, 1, 1]), ("prompt", [6, 6, 6]), ("generated", [0, 0, 4]), ((0, 5), [2, 2, 2])],
)
def test_what_is_returned_is_counted(positions: CapturedPositions, counts: list[int]) -> None:
    capture = CaptureAsk((0,), positions)

    assert [counted_positions(capture, 6, max_tokens) for max_tokens in (0, 1, 5)] == counts


def test_positions_that_cannot_come_are_refused_with_those_that_can() -> None:
    check_positions(CaptureAsk((0,), (0, 9)), 6, 5)
    check_positions(CaptureAsk((0,), "generated"), 6, 0)

    with pytest.raises(
        InvalidPositions, match="names position 10, but 6 prompt tokens and max_tokens 5 give positions 0 to 9"
    ):
        check_positions(CaptureAsk((0,), (0, 10)), 6, 5)
    with pytest.raises(InvalidPositions, match="0 to 5"):
        check_positions(CaptureAsk((0,), (6,)), 6, 0)


def test_steered_positions_that_no_prompt_comes_to_are_refused() -> None:
    one, three = np.ones((1, 4), np.float32), np.ones((1, 3, 4), np.float32)
    fit = [
        SteeringVector((0,), one, spans=((0, 2), (4, 10**6))),  # to the end, wherever that is
        SteeringVector((0,), three, positions=(4, 0, 2)),
        SteeringVector((0,), three),
    ]
    check_steered_positions(fit, [2, 3], 3)

    for vector in (
        SteeringVector((0,), one, spans=((5, 6),)),
        SteeringVector((0,), three, positions=(0, 1, 5)),
        SteeringVector((0,), np.ones((1, 6, 4), np.float32)),
    ):
        with pytest.raises(
            InvalidPositions, match="vector 0 names position 5, but 3 prompt tokens .* positions 0 to 4"
        ):
            check_steered_positions([vector], [2, 3], 3)
