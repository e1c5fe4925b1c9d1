"""Rows of every kind come in as one finite float matrix, or are refused in one sentence."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from streamtap.activations import Activations, Provenance
from streamtap.errors import InvalidRows
from streamtap.probes.rows import layer_of, read_rows

VALUES = [[1.5, -2.0, 0.25], [3.0, 4.0, -8.0]]


def activations(layers: dict[int, Any], counts: list[int]) -> Activations:
    n = sum(counts)
    return Activations(
        acts=layers,
        offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        token_ids=np.zeros(n, np.int32),
        positions=np.zeros(n, np.int32),
        provenance=Provenance(model="m", commit="c", tokenizer="t", dtype="float32"),
    )


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.int8])
def test_narrow_dtypes_become_float32_with_the_same_values(dtype: Any) -> None:
    source = np.array(VALUES).astype(dtype)
    rows = read_rows(source)
    assert rows.dtype == np.float32
    np.testing.assert_array_equal(rows, source.astype(np.float32))


@pytest.mark.parametrize("source", [VALUES, np.array(VALUES), np.array([[2**24 + 1, 0]])])
def test_wide_dtypes_keep_every_digit(source: Any) -> None:
    rows = read_rows(source)
    assert rows.dtype == np.float64
    np.testing.assert_array_equal(rows, np.asarray(source))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_torch_tensors_are_read_even_with_gradients(dtype: str) -> None:
    rows = read_rows(torch.tensor(VALUES, dtype=getattr(torch, dtype), requires_grad=True))
    np.testing.assert_array_equal(rows, VALUES)
    assert rows.dtype == (np.float64 if dtype == "float64" else np.float32)


def test_activations_give_the_layer_asked_for() -> None:
    held = activations({3: np.ones((2, 4)), 7: np.full((2, 4), 7.0)}, [1, 1])
    np.testing.assert_array_equal(read_rows(held, layer=7), np.full((2, 4), 7.0))
    assert layer_of(held, 7) == 7
    assert layer_of(activations({3: np.ones((2, 4))}, [1, 1])) == 3
    assert layer_of(np.ones((2, 4)), 7) is None


@pytest.mark.parametrize(
    ("layer", "counts", "message"),
    [
        (None, [1, 1], r"hold \[3, 7\]; name one with layer="),
        (5, [1, 1], r"hold layers \[3, 7\], not layer 5"),
        (3, [1, 2], "prompt 1 has 2"),
        (3, [1, 0], "prompt 1 has 0"),
    ],
)
def test_activations_that_are_not_one_row_a_prompt_of_one_layer(layer: Any, counts: list[int], message: str) -> None:
    held = activations({3: np.ones((sum(counts), 4)), 7: np.ones((sum(counts), 4))}, counts)
    with pytest.raises(InvalidRows, match=message):
        read_rows(held, layer=layer)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (np.ones(3), r"got shape \(3,\); for a single row pass row\[None, :\]"),
        (np.ones((2, 3, 4)), r"got shape \(2, 3, 4\)"),
        (np.ones((0, 3)), "at least one row"),
        (np.ones((3, 0)), "at least one row"),
        (np.array([[1, None]], dtype=object), "dtype object"),
        (np.array([["a", "b"]]), "dtype <U1"),
        (np.array([[1j]]), "dtype complex128"),
        ([[1.0, 2.0], [3.0]], "uneven lengths"),
        (None, "dtype object"),
    ],
)
def test_what_is_no_matrix_of_numbers_is_refused(source: Any, message: str) -> None:
    with pytest.raises(InvalidRows, match=message):
        read_rows(source)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_the_first_row_that_is_not_finite_is_named(bad: float, dtype: Any) -> None:
    source = np.ones((6, 3), dtype=dtype)
    source[4, 1] = source[5, 0] = bad
    with pytest.raises(InvalidRows, match=r"row 4 holds NaN or infinity \(2 of 6"):
        read_rows(source)


def test_another_width_is_refused() -> None:
    with pytest.raises(InvalidRows, match="fitted on rows 5 wide; got 3"):
        read_rows(VALUES, hidden=5)
