"""What callers hold in their hands, numpy, torch or lists, as plain values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamtap.errors import InvalidInput


def as_floats(values: Any, what: str) -> NDArray[np.float32]:
    """``values`` as float32, of any shape and on any device; ``what`` names them in an error.

    Raises:
        InvalidInput: not numbers, ragged, or not finite in float32.
    """
    if hasattr(values, "detach"):  # a torch tensor; numpy knows neither its gradient nor its bfloat16
        values = values.detach().to("cpu").float().numpy()
    try:
        with np.errstate(over="ignore"):
            floats = np.asarray(values).astype(np.float32)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"{what} must be an array of numbers; got {type(values).__name__}.") from error
    if not np.isfinite(floats).all():
        raise InvalidInput(f"{what} must be finite; it holds NaN, infinity or a number too large for float32.")
    return floats


def as_ints(values: Iterable[Any], what: str) -> tuple[int, ...]:
    """``values`` as Python's own ints.

    Raises:
        InvalidInput: no list, or one is not a whole number.
    """
    listed = values.tolist() if hasattr(values, "tolist") else values
    # A string has letters, and bytes would pass for numbers.
    if isinstance(listed, str | bytes | Mapping) or not isinstance(listed, Iterable):
        raise InvalidInput(f"{what} must be whole numbers in a list; got {type(values).__name__}.")
    listed = list(listed)
    if any(isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer) for value in listed):
        raise InvalidInput(f"{what} must be whole numbers.")
    return tuple(int(value) for value in listed)
