"""What the engines' suite holds values to. Plain raises: an ``assert`` is silent under ``python -O``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamtap.errors import StreamtapError

#: Below this a row counts as zero, so that a relative error means nothing.
_LEAST_NORM = 1e-30


def hold(condition: bool, message: str) -> None:
    """Fail the test with ``message`` unless ``condition``.

    Raises:
        AssertionError: it does not hold.
    """
    if not condition:
        raise AssertionError(message)


def row_errors(rows: NDArray[Any], expected: NDArray[Any]) -> NDArray[np.float64]:
    """‖a − b‖ / ‖b‖ of every row, float64 [rows], of ``rows`` and ``expected`` [rows, hidden]."""
    wide, right = rows.astype(np.float64), expected.astype(np.float64)
    errors: NDArray[np.float64] = np.linalg.norm(wide - right, axis=-1) / np.maximum(
        np.linalg.norm(right, axis=-1), _LEAST_NORM
    )
    return errors


def hold_rows(rows: NDArray[Any], expected: NDArray[Any], tolerance: float, what: str) -> None:
    """Hold every row of ``rows`` [rows, hidden] to within ``tolerance`` of ``expected``, relative to its length.

    Raises:
        AssertionError: a row is further away, is not finite, lacks, or is of another width.
    """
    hold(rows.shape == expected.shape, f"{what}: shape {list(rows.shape)}, expected {list(expected.shape)}")
    errors = row_errors(rows, expected)
    # Written so that NaN fails.
    bad = np.flatnonzero(~(errors <= tolerance))
    hold(
        not len(bad),
        f"{what}: row {bad[:1].tolist()} is {errors[bad[:1]].tolist()} away, relative to its length; at most "
        f"{tolerance} is allowed, and {len(bad)} of {len(errors)} rows are further",
    )


def refused(kind: type[StreamtapError] | tuple[type[StreamtapError], ...], call: Callable[[], Any]) -> StreamtapError:
    """The error of class ``kind`` that ``call`` raises.

    Raises:
        AssertionError: it raised none, or another of ours.
    """
    kinds = kind if isinstance(kind, tuple) else (kind,)
    named = " or ".join(each.__name__ for each in kinds)
    try:
        call()
    except kinds as error:
        hold(bool(str(error)), f"{type(error).__name__} was raised without a word")
        return error
    except StreamtapError as error:
        raise AssertionError(f"expected {named}; {type(error).__name__} came: {error}") from error
    raise AssertionError(f"expected {named}; nothing was raised")
