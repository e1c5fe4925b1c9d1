"""``Probe``: a classifier on rows of the residual stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamtap.errors import InvalidInput, Unsupported
from streamtap.probes.estimators import Estimator, convergence, fit_classifier, make_classifier, name_of
from streamtap.probes.labels import read_labels
from streamtap.probes.linear import raw_direction
from streamtap.probes.rows import Rows, layer_of, read_rows
from streamtap.probes.scores import Scores, score_classifier

__all__ = ["Probe", "Scores"]


class Probe:
    """A classifier on rows [rows, hidden], with its scaling learnt from the training rows.

    ``classifier`` is "logistic_regression", "ridge", "lda", "mass_mean" or a scikit-learn
    classifier, which is cloned. ``preprocessing`` is "standard", "none", "pca:N" or
    "standard+pca:N". Everything is stored as given and checked when fitted.

    Rows are numpy (bfloat16 and float16 too), a torch tensor on any device, a nested list, or
    ``Activations`` with one row a prompt. Labels are ints, bools or strings, and predictions come
    back in that type.

    After fitting:

    - ``classes_`` [classes]: the labels, ascending.
    - ``converged_``: False where the solver stopped at its iteration limit; None where the
      solver does not say (closed forms have no iterations). ``n_iter_``: the iterations, or None.
    - ``direction_`` float64 [hidden] and ``intercept_``: for a linear classifier of two labels,
      in the space of the raw rows with the preprocessing folded in: ``rows @ direction_ +
      intercept_ > 0`` says ``classes_[1]``. Not of unit length. None for other classifiers.
    - ``layer_``: the layer of the ``Activations`` it was fitted on, or None.
    - ``pipeline_``: the fitted scikit-learn pipeline.
    """

    classes_: NDArray[Any]
    converged_: bool | None
    n_iter_: int | None
    direction_: NDArray[np.float64] | None
    intercept_: float | None
    layer_: int | None
    pipeline_: Estimator

    def __init__(
        self,
        classifier: str | Estimator = "logistic_regression",
        *,
        random_state: int | None = None,
        classifier_kwargs: Mapping[str, Any] | None = None,
        preprocessing: str = "standard",
    ) -> None:
        """Store the choices; nothing is checked before ``fit_from_activations``."""
        self.classifier = classifier
        self.random_state = random_state
        self.classifier_kwargs = classifier_kwargs
        self.preprocessing = preprocessing

    def __repr__(self) -> str:
        """The choices, and whether it is fitted."""
        state = f"fitted on {self.pipeline_.n_features_in_} columns" if hasattr(self, "pipeline_") else "not fitted"
        return f"Probe(classifier={name_of(self.classifier)!r}, preprocessing={self.preprocessing!r}; {state})"

    def fit_from_activations(self, X: Any, y: Any, *, layer: int | None = None) -> Probe:
        """Fit on rows ``X`` [rows, hidden] and labels ``y`` [rows]; ``layer`` chooses one of an ``Activations``.

        A solver that does not converge says so in ``converged_``, beside scikit-learn's own warning.

        Raises:
            InvalidRows: rows or labels that cannot be learnt from; the message says which and why.
            InvalidInput: an unknown classifier, preprocessing or parameter.
        """
        pipeline = make_classifier(self.classifier, self.random_state, self.classifier_kwargs, self.preprocessing)
        rows = read_rows(X, layer=layer)
        labels = read_labels(y, len(rows))
        self.pipeline_ = fit_classifier(pipeline, rows, labels)
        self.layer_ = layer_of(X, layer)
        self.classes_ = np.asarray(self.pipeline_.classes_)
        self.converged_, self.n_iter_ = convergence(self.pipeline_)
        self.direction_, self.intercept_ = raw_direction(self.pipeline_) or (None, None)
        return self

    def predict_from_activations(self, X: Any) -> NDArray[Any]:
        """Labels [rows] for rows ``X`` [rows, hidden], in the type of the training labels.

        Raises:
            InvalidInput: not fitted yet.
            InvalidRows: rows that do not fit those it was fitted on.
        """
        return np.asarray(self._fitted().predict(self._read(X)))

    def predict_proba_from_activations(self, X: Any) -> NDArray[np.float64]:
        """Probabilities float64 [rows, classes], columns in the order of ``classes_``.

        Raises:
            Unsupported: the classifier gives none, as "ridge" does.
            InvalidInput: not fitted yet.
            InvalidRows: rows that do not fit those it was fitted on.
        """
        pipeline = self._fitted()
        if not hasattr(pipeline, "predict_proba"):
            raise Unsupported(
                f"classifier {name_of(self.classifier)!r} gives no probabilities; use 'logistic_regression', 'lda' or "
                "'mass_mean', or predict_from_activations for labels alone."
            )
        return np.asarray(pipeline.predict_proba(self._read(X)), dtype=np.float64)

    def score_from_activations(self, X: Any, y: Any) -> float:
        """Accuracy on rows ``X`` [rows, hidden] with labels ``y`` [rows], from 0 to 1.

        Raises:
            InvalidInput: not fitted yet.
            InvalidRows: rows or labels that do not fit those it was fitted on.
        """
        return self.evaluate_from_activations(X, y).accuracy

    def evaluate_from_activations(self, X: Any, y: Any) -> Scores:
        """Accuracy with its interval, balanced accuracy, AUROC and the majority rate, with counts.

        Raises:
            InvalidInput: not fitted yet.
            InvalidRows: rows or labels that do not fit those it was fitted on.
        """
        pipeline, rows = self._fitted(), self._read(X)
        return score_classifier(pipeline, rows, read_labels(y, len(rows), min_classes=1))

    def _read(self, X: Any) -> Rows:
        return read_rows(X, layer=self.layer_, hidden=self.pipeline_.n_features_in_)

    def _fitted(self) -> Estimator:
        if not hasattr(self, "pipeline_"):
            raise InvalidInput("this Probe is not fitted yet; call fit_from_activations(X, y) first.")
        return self.pipeline_
