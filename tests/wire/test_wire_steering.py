"""Steering vectors on the wire, both ways."""

from __future__ import annotations

import base64
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from streamtap.completion import SteeringVector
from streamtap.errors import InvalidInput
from streamtap.wire.steering import MOST_DATA_BYTES, envelope_of, read_vector, vector_body

HIDDEN = 4
FLAT = np.arange(8, dtype=np.float32).reshape(2, HIDDEN)
DEEP = np.arange(24, dtype=np.float32).reshape(2, 3, HIDDEN)


def item(values: NDArray[Any], **fields: Any) -> dict[str, Any]:
    return {"activations": envelope_of(values.astype(ml_dtypes.bfloat16)), "layer_indices": [1, 3], **fields}


def refused(vector: Any) -> str:
    with pytest.raises(InvalidInput) as refused:
        read_vector(vector, n_layers=4, hidden=HIDDEN)
    return str(refused.value)


def test_one_vector_a_layer_acts_everywhere() -> None:
    vector = read_vector(item(FLAT))

    assert vector.layers == (1, 3)
    assert vector.vectors.dtype == np.float32
    assert np.array_equal(vector.vectors, FLAT)
    assert (vector.scale, vector.norm_match, vector.positions, vector.spans) == (1.0, False, None, None)


def test_one_vector_a_layer_acts_inside_spans() -> None:
    vector = read_vector(item(FLAT, position_spans=[[5, 9], [0, 2], [2, 5]], scale=-2, norm_match=True))

    assert vector.spans == ((0, 2), (2, 5), (5, 9))
    assert (vector.scale, vector.norm_match, vector.positions) == (-2.0, True, None)


def test_one_vector_a_position_acts_at_its_own() -> None:
    vector = read_vector(item(DEEP, position_indices=[7, 0, 2]))

    assert vector.positions == (7, 0, 2)
    assert np.array_equal(vector.vectors, DEEP)


def test_one_vector_a_position_without_positions_acts_at_the_first() -> None:
    assert read_vector(item(DEEP)).positions == (0, 1, 2)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_precisions_and_plain_bytes_are_read(dtype: str) -> None:
    data = base64.b64encode(FLAT.astype(dtype).tobytes()).decode()

    vector = read_vector({"activations": {"data": data, "dtype": dtype, "shape": [2, 4]}, "layer_indices": [0, 1]})

    assert np.array_equal(vector.vectors, FLAT)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_indices": [1]}, "1 layer_indices for a shape of 2 layers"),
        ({"layer_indices": []}, "layer_indices must be a list of layer numbers"),
        ({"layer_indices": [1, 1]}, "names a layer twice"),
        ({"layer_indices": [-1, 1]}, "got -1 at [0]"),
        ({"layer_indices": [True, 0]}, "got true at [0]"),
        ({"layer_indices": [1, 4]}, "names layer 4; the model has layers 0 to 3"),
        ({"layer_indices": None}, "layer_indices must be"),
        ({"scale": float("nan")}, "scale must be a finite number"),
        ({"scale": float("inf")}, "scale must be a finite number"),
        ({"scale": True}, "scale must be a finite number; got true"),
        ({"norm_match": 1}, "norm_match must be true or false"),
        ({"position_indices": [0, 1]}, "position_indices with shape (layers, hidden)"),
        ({"position_indices": []}, "position_indices must be"),
        ({"position_spans": []}, "position_spans must be"),
        ({"position_spans": [[0]]}, "position_spans must be"),
        ({"position_spans": [[-1, 2]]}, "position_spans must be"),
        ({"position_spans": [[2, 2]]}, "start < end"),
        ({"position_spans": [[3, 2]]}, "start < end"),
        ({"position_spans": [[4, 6], [0, 5]]}, "overlap"),
        ({"position_spans": [[0, 9], [1, 2]]}, "overlap"),
        ({"activations": None}, "activations must be an object"),
        ({"activations": {"residual_stream": {}}}, "activations.residual_stream is not a field here"),
        ({"surprise": 1}, "surprise is not a field here"),
    ],
)
def test_flat_vectors_that_mean_nothing_are_refused(fields: dict[str, Any], message: str) -> None:
    assert message in refused(item(FLAT, **fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"position_indices": [0, 1]}, "2 position_indices for a shape of 3 positions"),
        ({"position_indices": [0, 1, 1]}, "names a position twice"),
        ({"position_indices": [0, 1, -1]}, "got -1 at [2]"),
        ({"position_spans": [[0, 3]]}, "position_spans with shape (layers, positions, hidden)"),
    ],
)
def test_deep_vectors_that_mean_nothing_are_refused(fields: dict[str, Any], message: str) -> None:
    assert message in refused(item(DEEP, **fields))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": [2, 5]}, "must unpack to 20 bytes"),
        ({"shape": [8]}, "shape must be [layers, hidden]"),
        ({"shape": [2, 0]}, "shape must be [layers, hidden]"),
        ({"shape": [2, 1, 1, 4]}, "shape must be [layers, hidden]"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"original_dtype": "torch.float64"}, "original_dtype must be"),
        ({"compression": "lz4"}, "compression must be"),
        ({"data": "!"}, "standard base64"),
        ({"data": 3}, "data must be base64 of the values; got 3"),
        ({"data": "A" * (MOST_DATA_BYTES + 1)}, "at most 524288 are taken"),
    ],
)
def test_envelopes_that_mean_nothing_are_refused(change: dict[str, Any], message: str) -> None:
    vector = item(FLAT)

    assert message in refused(vector | {"activations": vector["activations"] | change})


def test_data_of_the_largest_size_is_looked_at() -> None:
    vector = item(FLAT)
    largest = vector | {"activations": vector["activations"] | {"data": "A" * MOST_DATA_BYTES}}

    assert "one zstd frame" in refused(largest)


def test_a_few_bytes_that_say_gigabytes_are_refused() -> None:
    frame = zstandard.ZstdCompressor().compress(bytes(64 * 1024 * 1024))
    envelope = {"data": base64.b64encode(frame).decode(), "dtype": "int16", "shape": [1, 2**25], "compression": "zstd"}

    assert "at most 16777216 are taken" in refused({"activations": envelope, "layer_indices": [0]})


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    values = FLAT.copy()
    values[0, 1] = value

    assert "not finite" in refused(item(values))


def test_another_width_is_refused_with_both() -> None:
    with pytest.raises(InvalidInput, match="is 4 wide; the model's residual stream is 8 wide"):
        read_vector(item(FLAT), hidden=8)


@pytest.mark.parametrize("vector", [None, 3, "x", []])
def test_what_is_no_object_is_refused(vector: Any) -> None:
    assert "must be an object" in refused(vector)


def test_a_vector_is_written_in_as_few_bits_as_hold_it() -> None:
    exact = vector_body(SteeringVector((0, 1), FLAT))
    wide = vector_body(SteeringVector((0, 1), FLAT / 3))

    assert exact["activations"]["dtype"] == "int16"
    assert wide["activations"]["dtype"] == "float32"
    assert "position_indices" not in exact


_FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    values=arrays.arrays(np.float32, arrays.array_shapes(min_dims=2, max_dims=3, max_side=4), elements=_FINITE),
    scale=st.floats(allow_nan=False, allow_infinity=False),
    norm_match=st.booleans(),
    spread=st.booleans(),
)
def test_what_is_written_is_read(values: NDArray[np.float32], scale: float, norm_match: bool, spread: bool) -> None:
    layers = tuple(range(len(values)))
    deep = values.ndim == 3
    sent = SteeringVector(
        layers,
        values,
        scale,
        norm_match,
        positions=tuple(range(values.shape[1])) if deep else None,
        spans=((0, 2), (5, 9)) if spread and not deep else None,
    )

    back = read_vector(vector_body(sent), n_layers=len(layers), hidden=values.shape[-1])

    assert np.array_equal(back.vectors, sent.vectors)
    assert (back.layers, back.scale, back.norm_match) == (layers, scale, norm_match)
    assert (back.positions, back.spans) == (sent.positions, sent.spans)
