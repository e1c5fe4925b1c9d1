"""The one direction that a fitted binary linear pipeline reads."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def raw_direction(pipeline: Any) -> tuple[NDArray[np.float64], float] | None:
    """Direction float64 [hidden] and intercept in the space of the raw rows, preprocessing folded in.

    ``rows @ direction + intercept`` is the pipeline's decision function. None where there is no
    single one: more than two classes, a classifier that is not linear, or unknown steps.
    """
    coef = getattr(pipeline[-1], "coef_", None)
    intercept = getattr(pipeline[-1], "intercept_", None)
    if coef is None or intercept is None or np.shape(np.atleast_2d(coef))[0] != 1 or len(pipeline.classes_) != 2:
        return None
    direction = np.asarray(coef, dtype=np.float64).ravel()
    offset = float(np.ravel(intercept)[0])
    for name, step in reversed(pipeline.steps[:-1]):
        direction, shift = _UNFOLD[name](step, direction)
        offset += shift
    return direction, offset


def _unscale(step: Any, direction: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    raw = direction / step.scale_
    return raw, -float(step.mean_ @ raw)


def _unrotate(step: Any, direction: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    raw = direction @ step.components_
    return raw, -float(step.mean_ @ raw)


_UNFOLD = {"standard": _unscale, "pca": _unrotate}
