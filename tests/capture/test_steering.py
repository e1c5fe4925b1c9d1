"""The arithmetic of steering, position by position."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from streamtap.capture.steering import Steering
from streamtap.completion import SteeringVector
from streamtap.errors import InvalidInput

HIDDEN = 4
DIRECTION = np.array([1.0, -2.0, 0.5, 0.0], np.float32)


def _rows(n: int = 5) -> torch.Tensor:
    return torch.arange(n * HIDDEN, dtype=torch.float32).reshape(n, HIDDEN) + 1


def _steered(rows: torch.Tensor, first: int = 0, layer: int = 1, **fields: Any) -> torch.Tensor:
    fields = {"layers": (1,), "vectors": DIRECTION[None], **fields}
    changed = rows.clone()
    Steering([SteeringVector(**fields)], 3, HIDDEN, torch.device("cpu")).apply(layer, changed, first)
    return changed


def test_every_position_is_moved_by_scale_times_the_direction() -> None:
    assert torch.equal(_steered(_rows(), scale=3.0), _rows() + 3 * torch.from_numpy(DIRECTION))


def test_other_layers_are_left_alone() -> None:
    assert torch.equal(_steered(_rows(), layer=2), _rows())


def test_spans_count_absolute_positions_and_leave_their_end_out() -> None:
    moved = (_steered(_rows(), first=10, spans=((0, 11), (13, 99))) != _rows()).any(dim=1)

    assert moved.tolist() == [True, False, False, True, True]


def test_each_position_has_its_own_vector_wherever_the_pass_begins() -> None:
    vectors = np.stack([DIRECTION, 2 * DIRECTION, 4 * DIRECTION])[None]

    changed = _steered(_rows(), first=6, vectors=vectors, positions=(8, 100, 6)) - _rows()

    assert torch.equal(changed[2], torch.from_numpy(DIRECTION))
    assert torch.equal(changed[0], torch.from_numpy(4 * DIRECTION))
    assert not changed[[1, 3, 4]].any()


def test_one_vector_a_position_without_positions_begins_at_the_first_token() -> None:
    vectors = np.stack([DIRECTION, 2 * DIRECTION])[None]

    assert torch.equal((_steered(_rows(), vectors=vectors) - _rows())[1], torch.from_numpy(2 * DIRECTION))
    assert torch.equal(_steered(_rows(), first=2, vectors=vectors), _rows())


def test_norm_match_scales_to_each_tokens_norm() -> None:
    rows = _rows()
    wanted = rows + 0.5 * torch.from_numpy(DIRECTION) * rows.norm(dim=1, keepdim=True) / (
        np.linalg.norm(DIRECTION) + 1e-6
    )

    assert torch.allclose(_steered(rows, scale=0.5, norm_match=True), wanted, rtol=1e-6)


def test_a_later_vector_sees_what_an_earlier_one_did() -> None:
    rows = _rows(1)
    push = SteeringVector((0,), DIRECTION[None] * 10)
    match = SteeringVector((0,), DIRECTION[None], norm_match=True)
    unit = torch.from_numpy(DIRECTION) / (np.linalg.norm(DIRECTION) + 1e-6)

    first, last = rows.clone(), rows.clone()
    Steering([push, match], 1, HIDDEN, torch.device("cpu")).apply(0, first, 0)
    Steering([match, push], 1, HIDDEN, torch.device("cpu")).apply(0, last, 0)

    pushed = rows + 10 * torch.from_numpy(DIRECTION)
    assert torch.allclose(first, pushed + pushed.norm() * unit)
    assert torch.allclose(last, rows + rows.norm() * unit + 10 * torch.from_numpy(DIRECTION))
    assert not torch.allclose(first, last)


def test_scale_zero_changes_no_bit_even_of_what_is_not_finite() -> None:
    rows = torch.tensor([[float("inf"), -0.0, 1.0, float("nan")]])

    changed = _steered(rows, scale=0.0)

    assert changed.numpy().tobytes() == rows.numpy().tobytes()


def test_half_precision_is_rounded_once() -> None:
    rows = _rows().to(torch.bfloat16)

    changed = _steered(rows, scale=0.1)

    assert torch.equal(changed, (rows.float() + 0.1 * torch.from_numpy(DIRECTION)).to(torch.bfloat16))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"layers": (3,)}, "layer 3; the model's layers are 0 to 2"),
        ({"vectors": np.ones((1, 5), np.float32)}, "width 5"),
    ],
)
def test_what_the_model_does_not_have_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        _steered(_rows(), **fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"vectors": DIRECTION}, "must be .1 layers, hidden. or"),
        ({"layers": (1, 2)}, "must be .2 layers, hidden. or"),
        ({"scale": float("nan")}, "must be finite"),
        ({"vectors": np.full((1, HIDDEN), np.inf, np.float32)}, "must be finite"),
        ({"vectors": DIRECTION[None, None], "positions": (0, 1)}, "got 2"),
        ({"vectors": DIRECTION[None, None], "positions": (-1,)}, "0 or more"),
        ({"vectors": np.stack([DIRECTION] * 2)[None], "positions": (3, 3)}, "each once"),
        ({"positions": (0,)}, "as many positions as it has vectors"),
        ({"vectors": DIRECTION[None, None], "spans": ((0, 1),)}, "spans, which go with"),
    ],
)
def test_parts_that_do_not_fit_each_other_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        _steered(_rows(), **fields)
