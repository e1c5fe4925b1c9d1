"""What classifiers of linear scores share: scores, classes and probabilities from ``coef_`` and ``intercept_``."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from streamtap.errors import InvalidRows

Floats = NDArray[np.float64]


class LinearScores(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn ships no types
    """Base of classifiers that fit one linear score a class.

    A subclass' ``fit`` calls ``_read`` and ``_keep``. ``coef_`` is float64 [1, hidden] for two
    classes (positive: ``classes_[1]``) and [classes, hidden] for more; ``intercept_`` fits it.
    """

    classes_: NDArray[Any]
    coef_: Floats
    intercept_: Floats
    slope_: float = 1.0

    def decision_function(self, X: Any) -> Floats:
        """Scores float64 [rows] for two classes, [rows, classes] for more."""
        check_is_fitted(self)
        rows = validate_data(self, X, reset=False)
        scores: Floats = np.asarray(rows, dtype=np.float64) @ self.coef_.T + self.intercept_
        return scores[:, 0] if len(self.classes_) == 2 else scores

    def predict(self, X: Any) -> NDArray[Any]:
        """The class of the highest score for each row, [rows], in the type of the training labels."""
        best = np.argmax(_a_column_a_class(self.decision_function(X)), axis=1)
        return np.asarray(self.classes_[best])

    def predict_proba(self, X: Any) -> Floats:
        """Probabilities float64 [rows, classes]: the softmax of the scores times ``slope_``."""
        scores = _a_column_a_class(self.decision_function(X))
        return np.asarray(softmax(self.slope_ * scores, axis=1))

    def _read(self, X: Any, y: Any) -> tuple[Floats, NDArray[np.int64], Floats]:
        """Rows about their mean, each row's class number, and that mean, all checked."""
        rows, labels = validate_data(self, X, y)
        check_classification_targets(labels)
        self.classes_, codes = np.unique(labels, return_inverse=True)
        if len(self.classes_) < 2:
            raise InvalidRows("a classifier needs at least two classes to learn from; got one class.")
        wide = np.asarray(rows, dtype=np.float64)
        # About their mean, means far from 0 lose no digits in the squares below.
        centre = wide.mean(axis=0)
        return wide - centre, codes, centre

    def _keep(self, coef: Floats, offset: Floats, centre: Floats) -> None:
        """Store one score a class, ``(row - centre) @ coef.T + offset``, as sklearn's attributes."""
        intercept = offset - coef @ centre
        if len(self.classes_) == 2:
            coef, intercept = coef[1:] - coef[:1], intercept[1:] - intercept[:1]
        self.coef_, self.intercept_ = coef, intercept


def class_means(rows: Floats, codes: NDArray[np.int64]) -> Floats:
    """Mean row of each class, float64 [classes, hidden]."""
    return np.stack([rows[codes == code].mean(axis=0) for code in range(int(codes.max()) + 1)])


def _a_column_a_class(scores: Floats) -> Floats:
    return np.column_stack([np.zeros_like(scores), scores]) if scores.ndim == 1 else scores
