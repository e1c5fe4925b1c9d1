from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from streamtap import Probe
from streamtap.client.directions import relative_scale
from streamtap.errors import InvalidInput

ROWS = np.random.default_rng(0).normal(size=(40, 6)) * 3
LABELS = np.arange(40) % 2


def _mean_difference(rows: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    probe = Probe("mass_mean", preprocessing="none").fit_from_activations(rows, labels)
    assert probe.direction_ is not None
    return probe.direction_


def test_the_scaled_direction_is_as_long_as_the_fraction_of_a_typical_row() -> None:
    direction = np.array([0.1, 0, 0, 0, 0, -0.2])

    scale = relative_scale(direction, ROWS, -0.5)

    assert scale < 0
    typical = np.median(np.linalg.norm(ROWS, axis=1))
    assert np.linalg.norm(scale * direction) == pytest.approx(0.5 * typical, rel=1e-6)


def test_one_huge_row_does_not_move_what_is_typical() -> None:
    with_first_token = np.vstack([ROWS[:-1], ROWS[-1:] * 1000])

    assert relative_scale(ROWS[0], with_first_token, 1.0) == pytest.approx(relative_scale(ROWS[0], ROWS, 1.0), rel=0.1)


def test_a_stream_ten_times_as_large_is_moved_by_the_same_part_of_itself() -> None:
    """V61: a scale alone does not transfer from layer to layer, nor from model to model."""
    small, large = ROWS, ROWS * 10
    shifts = []
    for rows in (small, large):
        direction = _mean_difference(rows, LABELS)
        shifts.append(relative_scale(direction, rows, 0.3) * direction / np.median(np.linalg.norm(rows, axis=1)))

    np.testing.assert_allclose(shifts[0], shifts[1], rtol=1e-6)


def test_the_direction_between_two_classes_turns_round_with_their_labels() -> None:
    """V61: the sign is that of the class means, and not whichever way an eigenvector points."""
    direction = _mean_difference(ROWS, LABELS)

    np.testing.assert_allclose(_mean_difference(ROWS, 1 - LABELS), -direction, rtol=1e-9)
    means = ROWS[LABELS == 1].mean(0) - ROWS[LABELS == 0].mean(0)
    np.testing.assert_allclose(direction, means, rtol=1e-9)


def test_rows_in_bfloat16_do() -> None:
    narrow = ROWS.astype(ml_dtypes.bfloat16)

    assert relative_scale(ROWS[0], narrow, 1.0) == pytest.approx(relative_scale(ROWS[0], ROWS, 1.0), rel=0.01)


@pytest.mark.parametrize(
    ("direction", "rows", "message"),
    [
        (ROWS[0], ROWS[:, :3], r"got \[6\] and \[40, 3\]"),
        (ROWS, ROWS, r"got \[40, 6\] and \[40, 6\]"),
        (ROWS[0], ROWS[:0], r"got \[6\] and \[0, 6\]"),
        (np.zeros(6), ROWS, "whose length is not 0"),
        (ROWS[0], ROWS * 0, "whose length is not 0"),
    ],
)
def test_what_has_no_length_is_refused(direction: Any, rows: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        relative_scale(direction, rows, 0.5)
