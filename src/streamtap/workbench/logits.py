"""``Logits``: what the head gave of several prompts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Logits:
    """Logits of several prompts.

    ``values`` is float32 [rows, vocabulary or k]; ``ids`` int32 of that shape where a top k was
    kept, else None. Prompt i owns rows ``offsets[i]:offsets[i + 1]``, one where only the last
    position was asked for.
    """

    values: NDArray[np.float32]
    ids: NDArray[np.int32] | None
    offsets: NDArray[np.int64]
