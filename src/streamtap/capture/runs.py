"""What runs and what comes of it, as plain arrays: known to engines with torch and to those without."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.int32]


@dataclass(frozen=True)
class TokenRun:
    """One token sequence to run: int32 [tokens], the positions that have a row, and its place for errors."""

    token_ids: TokenIds
    chosen: NDArray[np.int32]
    name: int


@dataclass(frozen=True)
class HostRows:
    """What some sequences gave, one after another.

    ``rows`` is [layers, rows, hidden]; ``counts`` the rows of each sequence; ``positions`` int32 [rows], -1 for pooled
    ones that stand on no token. ``nll`` is float32 [tokens - 1] each; ``logits`` float32 [logit rows, k or vocabulary]
    each, and ``logit_ids`` int32 alike.
    """

    rows: NDArray[Any] | None
    counts: NDArray[np.int64]
    positions: NDArray[np.int32]
    nll: list[NDArray[np.float32]] | None
    logits: list[NDArray[np.float32]] | None
    logit_ids: list[NDArray[np.int32]] | None
