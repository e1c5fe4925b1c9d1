"""``Segments``: which documents a window of tokens is made of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Segments:
    """Which documents a window is made of, in order.

    Of each, all [segments]: ``documents`` its row in the input, int64; ``offsets`` the first of its tokens that is in
    the window, int64; ``starts`` where in the window it begins, int32.
    """

    documents: NDArray[np.int64]
    offsets: NDArray[np.int64]
    starts: NDArray[np.int32]
