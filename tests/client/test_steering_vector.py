from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from streamtap import steering_vector
from streamtap.completion import SteeringVector
from streamtap.errors import InvalidInput
from streamtap.wire.steering import read_vector

DIRECTION = np.array([1.0, -2.0, 0.5, 3.0])


def _read(*arguments: Any, **options: Any) -> SteeringVector:
    """What a server takes from it."""
    return read_vector(steering_vector(*arguments, **options), n_layers=8, hidden=4)


def test_the_envelope_is_that_of_the_contract() -> None:
    body = steering_vector(np.array([1.0, -2.0]), 3, 2.5)

    assert body["activations"]["dtype"] == "int16"
    assert body["activations"]["original_dtype"] == "torch.bfloat16"
    assert body["activations"]["shape"] == [1, 2]
    assert body["activations"]["compression"] == "zstd"
    assert {name: body[name] for name in ("layer_indices", "scale", "norm_match")} == {
        "layer_indices": [3],
        "scale": 2.5,
        "norm_match": False,
    }


@pytest.mark.parametrize(
    "direction",
    [
        DIRECTION,
        DIRECTION.astype(np.float32),
        DIRECTION.tolist(),
        torch.tensor(DIRECTION, requires_grad=True),
        torch.tensor(DIRECTION, dtype=torch.bfloat16),
    ],
    ids=["float64", "float32", "list", "torch", "bfloat16"],
)
def test_any_array_will_do(direction: Any) -> None:
    found = _read(direction, 3, -0.5, norm_match=True)

    assert found.vectors.tolist() == [DIRECTION.tolist()]
    assert (found.layers, found.scale, found.norm_match) == ((3,), -0.5, True)
    assert (found.positions, found.spans) == (None, None)


def test_several_layers_have_a_vector_each() -> None:
    both = np.stack([DIRECTION, -DIRECTION])

    found = _read(both, [2, 5])

    assert found.layers == (2, 5)
    assert found.vectors.tolist() == both.tolist()


def test_one_vector_at_several_positions_is_sent_once() -> None:
    found = _read(DIRECTION, 3, positions=[5, 3, 4, 9, 4])

    assert found.vectors.shape == (1, 4)
    assert found.spans == ((3, 6), (9, 10))


def test_several_layers_at_several_positions_have_a_vector_each_layer() -> None:
    found = _read(np.stack([DIRECTION, -DIRECTION]), [2, 5], positions=np.array([0, 1]))

    assert found.vectors.shape == (2, 4)
    assert found.spans == ((0, 2),)


def test_a_vector_for_each_position_keeps_their_order() -> None:
    found = _read(np.stack([DIRECTION, -DIRECTION]), 3, positions=[7, 2])

    assert found.positions == (7, 2)
    assert found.vectors.tolist() == [[DIRECTION.tolist(), (-DIRECTION).tolist()]]


def test_a_block_of_layers_and_positions_is_for_the_first_positions() -> None:
    block = np.arange(24, dtype=np.float32).reshape(2, 3, 4)

    assert _read(block, [1, 2]).positions == (0, 1, 2)
    assert _read(block, [1, 2], positions=[4, 6, 8]).positions == (4, 6, 8)


def test_spans_are_passed_on() -> None:
    assert _read(DIRECTION, 3, spans=[(0, 2), (4, 9)]).spans == ((0, 2), (4, 9))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((DIRECTION, [1, 2]), {}, r"for 2 layers must be \[2, hidden\]; got \[4\]"),
        ((np.ones((2, 4)), 1), {}, r"for 1 layer must be \[hidden\]; got \[2, 4\]"),
        ((np.ones((2, 4)), 1), {"positions": [1, 2, 3]}, r"or \[3, hidden\] for one vector a position; got \[2, 4\]"),
        ((np.ones((1, 2, 4)), 1), {"positions": [1]}, r"1 positions need as many vectors each layer; got \[1, 2, 4\]"),
        ((1.0, 1), {}, r"must be \[hidden\]; got \[\]"),
        (([], 1), {}, r"must be \[hidden\]; got"),
        ((DIRECTION, -1), {}, "layer must be a block's number from 0"),
        ((DIRECTION, []), {}, "layer must be a block's number from 0"),
        ((DIRECTION, 1.5), {}, "layer must be whole numbers"),
        ((DIRECTION, True), {}, "layer must be whole numbers"),
        ((DIRECTION, 1, float("nan")), {}, "scale must be a finite number; got nan"),
        ((DIRECTION, 1, "a"), {}, "scale must be a finite number; got 'a'"),
        ((DIRECTION, 1, None), {}, "scale must be a finite number; got NoneType"),
        ((DIRECTION, 1, [1.0, 2.0]), {}, "scale must be a finite number; got list"),
        ((DIRECTION, 1), {"positions": 5}, "positions must be whole numbers in a list; got int"),
        ((DIRECTION, 1), {"spans": 5}, "spans must be a list of pairs"),
        ((DIRECTION, 1), {"spans": [(1,)]}, "spans must be a list of pairs"),
        ((DIRECTION, 1), {"spans": [5]}, "spans must be whole numbers in a list; got int"),
        (([1.0, float("inf")], 1), {}, "direction must be finite"),
        (([1.0, 1e300], 1), {}, "too large for float32"),
        ((["a", "b"], 1), {}, "direction must be an array of numbers; got list"),
        (([[1.0], [1.0, 2.0]], 1), {}, "direction must be an array of numbers"),
        ((DIRECTION, 1), {"positions": []}, "positions must name at least one"),
        ((DIRECTION, 1), {"positions": [1], "spans": [(0, 1)]}, "positions or spans, not both"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: Any, options: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        steering_vector(*arguments, **options)
