"""How strong a direction is beside the residual stream that it is added to."""

from __future__ import annotations

from typing import Any

import numpy as np

from streamtap.client.arrays import as_floats
from streamtap.errors import InvalidInput


def relative_scale(direction: Any, rows: Any, fraction: float) -> float:
    """The ``scale`` that makes ``direction`` [hidden] as long as ``fraction`` of a typical row.

    ``rows`` [rows, hidden] are activations of the layer that will be steered: the stream grows with depth, and from
    model to model, so a scale means little by itself. Typical is the median of their norms, which the huge
    row of a first token does not move. The sign of ``fraction`` is kept.

    Raises:
        InvalidInput: shapes that do not fit, no rows, or a direction or rows of length 0.
    """
    vector, block = as_floats(direction, "direction"), as_floats(rows, "rows")
    if vector.ndim != 1 or block.ndim != 2 or block.shape[1:] != vector.shape or not len(block):
        raise InvalidInput(
            f"relative_scale needs a direction [hidden] and rows [rows, hidden]; got {list(vector.shape)} and "
            f"{list(block.shape)}."
        )
    length = float(np.linalg.norm(vector.astype(np.float64)))
    typical = float(np.median(np.linalg.norm(block.astype(np.float64), axis=1)))
    if not length or not typical:
        raise InvalidInput("relative_scale needs a direction and rows whose length is not 0.")
    return fraction * typical / length
