"""Linear discriminant analysis that stays quick where rows are fewer than columns."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.linalg import cho_factor, cho_solve

from streamtap.errors import InvalidInput
from streamtap.probes.means import Floats, LinearScores, class_means


class ShrinkageLda(LinearScores):
    """Linear discriminant analysis with the pooled within-class covariance shrunk towards a sphere.

    Fisher (1936); the shrinkage weight is Ledoit & Wolf's (2004), "A well-conditioned estimator for
    large-dimensional covariance matrices", unless ``shrinkage`` is a number in (0, 1]. With fewer
    rows than ``hidden`` the same solution comes from a [rows, rows] system (Woodbury's identity):
    no [hidden, hidden] matrix is made. This is the "iid" form of the mass-mean probe as well.
    """

    shrinkage_: float

    def __init__(self, shrinkage: str | float = "auto") -> None:
        """Store ``shrinkage``: "auto" or a number in (0, 1]."""
        self.shrinkage = shrinkage

    def fit(self, X: Any, y: Any) -> ShrinkageLda:
        """Learn from rows [rows, hidden] and labels [rows].

        Raises:
            InvalidInput: a shrinkage that is neither "auto" nor in (0, 1].
            InvalidRows: one class only.
        """
        rows, codes, centre = self._read(X, y)
        means = class_means(rows, codes)
        within = rows - means[codes]
        self.shrinkage_ = ledoit_wolf(within) if self.shrinkage == "auto" else self._given()
        coef = _solve_shrunk(within, self.shrinkage_, means)
        priors = np.bincount(codes) / len(codes)
        self._keep(coef, np.log(priors) - 0.5 * (means * coef).sum(axis=1), centre)
        return self

    def _given(self) -> float:
        if isinstance(self.shrinkage, str) or not 0 < self.shrinkage <= 1:
            raise InvalidInput(f"shrinkage must be 'auto' or a number in (0, 1]; got {self.shrinkage!r}.")
        return float(self.shrinkage)


def ledoit_wolf(rows: Floats) -> float:
    """Ledoit & Wolf's weight of the sphere for the covariance of centred ``rows`` [rows, hidden], in [0, 1]."""
    n, hidden = rows.shape
    gram = rows @ rows.T if n < hidden else rows.T @ rows
    norms = (rows**2).sum(axis=1)
    squares = float((gram**2).sum()) / n**2
    sphere = float(norms.sum()) / n / hidden
    noise = (float((norms**2).sum()) / n - squares) / (hidden * n)
    distance = squares / hidden - sphere**2
    return min(noise, distance) / distance if noise > 0 and distance > 0 else 0.0


def _solve_shrunk(within: Floats, weight: float, targets: Floats) -> Floats:
    """Solve ``((1 - weight) S + weight * tr(S) / hidden * I) x = t`` for each row t of ``targets``."""
    n, hidden = within.shape
    sphere = float((within**2).sum()) / n / hidden
    if sphere == 0.0:
        # Every class is one point: there is no spread to divide by.
        return targets
    ridge = max(weight, np.finfo(np.float64).eps * hidden) * sphere
    scaled = within * np.sqrt((1 - weight) / n)
    if n >= hidden:
        return np.asarray(cho_solve(cho_factor(scaled.T @ scaled + ridge * np.eye(hidden)), targets.T)).T
    inner = cho_factor(scaled @ scaled.T + ridge * np.eye(n))
    inside: Floats = np.asarray(cho_solve(inner, scaled @ targets.T)).T @ scaled
    solved: Floats = (targets - inside) / ridge
    return solved
