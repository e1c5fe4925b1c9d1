"""The mass-mean probe: the difference of the class means as the direction."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import softmax

from streamtap.probes.means import Floats, LinearScores, class_means


class MassMeanClassifier(LinearScores):
    """Direction from one class mean to the other, threshold at the midpoint between them.

    Marks & Tegmark (2023), "The Geometry of Truth", arXiv:2310.06824. More than two classes: the
    nearest class mean, of which two classes are the special case. On raw rows this is the paper's
    probe; behind a scaler the means are compared in units of each column's standard deviation.

    ``predict_proba`` is a logistic on the score, ``softmax(slope_ * score)``: only its slope is
    fitted (penalised maximum likelihood on the training rows, Platt 1999 without the offset), so
    that probability 0.5 stays at the midpoint. Fitted on the rows that gave the means, it is
    overconfident where rows are fewer than ``hidden``; it orders rows as the score does.
    """

    slope_: float

    def fit(self, X: Any, y: Any) -> MassMeanClassifier:
        """Learn from rows [rows, hidden] and labels [rows].

        Raises:
            InvalidRows: one class only.
        """
        rows, codes, centre = self._read(X, y)
        means = class_means(rows, codes)
        offset = -0.5 * (means**2).sum(axis=1)
        self._keep(means, offset, centre)
        self.slope_ = _slope(rows @ means.T + offset, codes)
        return self


def _slope(scores: Floats, codes: NDArray[np.int64]) -> float:
    """Slope that makes ``softmax(slope * scores)`` likeliest, under a unit Gaussian prior on its scaled value."""
    relative = scores - scores.mean(axis=1, keepdims=True)
    scale = float(relative.std())
    if scale == 0.0:
        return 1.0
    scaled = relative / scale
    own = scaled[np.arange(len(codes)), codes]

    def gradient(slope: float) -> float:
        expected = (softmax(slope * scaled, axis=1) * scaled).sum(axis=1)
        return float(slope - (own - expected).sum())

    # The gradient is below 0 at 0 (a row lies nearest its own mean on average) and above 0 at `most`.
    most = float((own - scaled.min(axis=1)).sum()) + 1.0
    return float(brentq(gradient, 0.0, most)) / scale if gradient(0.0) < 0 else 0.0
