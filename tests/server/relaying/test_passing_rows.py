"""Values are looked at, chosen and cast whatever pieces they come in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from streamtap.errors import CaptureMissed, SteeringNotFinite
from streamtap.server.relaying.passing_rows import PassingRows

Array = NDArray[Any]
BF16 = np.dtype(ml_dtypes.bfloat16)
LAYERS = (2, 5, 9)
ONLY_LAST = np.array([False, False, False, True])


def _passed(values: Array, wanted: Any = BF16, size: int = 7, **about: Any) -> Array:
    """What goes on of ``values``, which come in pieces of ``size`` bytes."""
    kept: list[Array] = []
    looks = PassingRows(
        LAYERS, values.shape, values.dtype, np.dtype(wanted), give=lambda rows: kept.append(rows), **about
    )
    raw = values.tobytes()
    for at in range(0, len(raw), size):
        looks.take(raw[at : at + size])
    return np.concatenate(kept) if kept else np.empty((0, values.shape[2]), wanted)


@pytest.mark.parametrize("size", [1, 7, 16, 33, 100_000])
def test_every_row_goes_on_as_it_is(size: int, made_rows: Callable[..., Array]) -> None:
    values = made_rows(3, 4)

    assert _passed(values, size=size).tobytes() == values.tobytes()


@pytest.mark.parametrize("size", [5, 100_000])
@pytest.mark.parametrize("came", [ml_dtypes.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("wanted", [ml_dtypes.bfloat16, np.float32])
def test_chosen_rows_go_on_in_the_dtype_that_is_wanted(
    came: Any, wanted: Any, size: int, made_rows: Callable[..., Array]
) -> None:
    values = made_rows(3, 4, came)

    kept = _passed(values, wanted, size, chosen=np.array([True, False, False, True]))

    expected = values[:, [0, 3]].astype(wanted).reshape(-1, 8)
    assert (kept.dtype, kept.tobytes()) == (expected.dtype, expected.tobytes())


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_a_value_that_is_not_finite_is_named_by_its_layer(
    dtype: Any, value: float, made_rows: Callable[..., Array]
) -> None:
    values = made_rows(3, 4, dtype)
    values[1, 3, 7] = value

    with pytest.raises(CaptureMissed, match="block 5 .* not finite") as caught:
        _passed(values)
    assert caught.value.layer == 5
    with pytest.raises(SteeringNotFinite, match="block 5 .* lower their scale"):
        _passed(values, steered=True)


def test_what_the_cast_makes_too_large_is_not_finite(made_rows: Callable[..., Array]) -> None:
    values = made_rows(3, 2, np.float32)
    values[2, 0, 0] = np.finfo(np.float32).max

    with pytest.raises(CaptureMissed, match="block 9"):
        _passed(values, ml_dtypes.bfloat16)
    assert _passed(values, np.float32).tobytes() == values.tobytes()


def test_a_layer_of_zeros_alone_is_dead(made_rows: Callable[..., Array]) -> None:
    values = made_rows(3, 4)
    values[2] = 0

    with pytest.raises(CaptureMissed, match="block 9 .* only zeros") as caught:
        _passed(values)
    assert caught.value.layer == 9
    with pytest.raises(CaptureMissed, match="block 9 .* only zeros"):
        _passed(values, chosen=ONLY_LAST)
    # A vector may have brought it about, and a token that stands alone may be padding.
    assert _passed(values, steered=True).tobytes() == values.tobytes()
    assert not _passed(np.zeros((3, 1, 8), BF16)).any()


def test_a_layer_with_one_value_is_alive(made_rows: Callable[..., Array]) -> None:
    values = np.zeros((3, 4, 8), ml_dtypes.bfloat16)
    values[:, 2, 1] = 1

    assert _passed(values, size=16).tobytes() == values.tobytes()


def test_a_layer_that_lives_in_rows_that_nobody_chose_is_alive(made_rows: Callable[..., Array]) -> None:
    values = made_rows(3, 4)
    values[1, 2:] = 0

    assert _passed(values, chosen=ONLY_LAST).tobytes() == values[:, [3]].tobytes()


@pytest.mark.parametrize("wanted", [ml_dtypes.bfloat16, np.float32])
def test_rows_that_nobody_chose_are_looked_at_as_they_came(wanted: Any, made_rows: Callable[..., Array]) -> None:
    values = made_rows(3, 4, np.float32)
    values[1, 0, 3] = np.finfo(np.float32).max  # too large for bfloat16, which it is not cast to
    assert len(_passed(values, wanted, chosen=ONLY_LAST)) == 3

    values[1, 0, 3] = np.nan
    with pytest.raises(CaptureMissed, match="block 5 .* not finite"):
        _passed(values, wanted, chosen=ONLY_LAST)
