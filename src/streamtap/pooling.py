"""Rows of one prompt to one row: plain functions on ragged rows."""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from streamtap.errors import InvalidInput

Pooling = Literal["last_token", "first_token", "mean", "max", "none"]
POOLINGS: tuple[str, ...] = get_args(Pooling)
#: Poolings whose row stands on one token, so that it keeps that token's id and position.
ONE_TOKEN = ("last_token", "first_token")


def check_pooling(pooling: str) -> Pooling:
    """Return ``pooling`` if it is one of ours.

    Raises:
        InvalidInput: it is not.
    """
    if pooling not in POOLINGS:
        raise InvalidInput(f"pooling must be one of {', '.join(POOLINGS)}; got {pooling!r}.")
    return pooling  # type: ignore[return-value]


def pool(rows: NDArray[Any], offsets: NDArray[np.int64], pooling: str) -> NDArray[Any]:
    """Pool ragged ``rows`` [rows, hidden] to [prompts, hidden], in the dtype of ``rows``.

    Prompt i owns rows ``offsets[i]:offsets[i + 1]`` and has at least one. Means are taken
    in float32 (float64 for float64 rows) and rounded once.

    Raises:
        InvalidInput: an unknown pooling, or a prompt without rows.
    """
    check_pooling(pooling)
    if pooling == "none":
        return rows
    starts, stops = offsets[:-1], offsets[1:]
    if np.any(starts == stops):
        raise InvalidInput(f"prompt {int(np.argmax(starts == stops))} has no rows to pool.")
    if pooling == "last_token":
        return rows[stops - 1]
    if pooling == "first_token":
        return rows[starts]
    wide = rows if rows.dtype == np.float64 else rows.astype(np.float32)
    if pooling == "max":
        maxima: NDArray[Any] = np.maximum.reduceat(wide, starts, axis=0)
        return maxima.astype(rows.dtype)
    counts = (stops - starts)[:, None]
    means: NDArray[Any] = np.add.reduceat(wide, starts, axis=0) / counts
    return means.astype(rows.dtype)
