"""How well predictions meet labels, with what a useless probe would reach beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from streamtap.errors import InvalidRows
from streamtap.probes.intervals import wilson


@dataclass(frozen=True)
class Scores:
    """Result on one set of labelled rows.

    ``counts`` gives rows per label. ``majority_rate`` is the accuracy of always naming the most
    frequent label; ``interval`` is the 95 % Wilson interval of ``accuracy``. ``balanced_accuracy``
    is the mean share found of each label that occurs, so that 0.5 is chance for two labels however
    rare one is. ``auroc`` is None for other than two labels, or where the classifier has no scores.
    """

    n: int
    counts: Mapping[Any, int]
    correct: int
    majority_rate: float
    accuracy: float
    interval: tuple[float, float]
    balanced_accuracy: float
    auroc: float | None = None


def score_predictions(
    labels: NDArray[Any], predicted: NDArray[Any], scores: NDArray[Any] | None = None, positive: Any = None
) -> Scores:
    """Compare ``predicted`` [rows] with ``labels`` [rows]; ``scores`` [rows] rise towards label ``positive``.

    Raises:
        InvalidRows: no rows, or lengths that differ.
    """
    if len(labels) == 0 or len(labels) != len(predicted):
        raise InvalidRows(f"scoring needs one prediction a label; got {len(predicted)} for {len(labels)} labels.")
    hits = labels == predicted
    classes, counts = np.unique(labels, return_counts=True)
    correct, n = int(hits.sum()), len(labels)
    return Scores(
        n=n,
        counts={label: int(count) for label, count in zip(classes.tolist(), counts, strict=True)},
        correct=correct,
        majority_rate=float(counts.max()) / n,
        accuracy=correct / n,
        interval=wilson(correct, n),
        balanced_accuracy=float(np.mean([hits[labels == label].mean() for label in classes])),
        auroc=None if scores is None or len(classes) != 2 else auroc(labels == positive, scores),
    )


def score_classifier(classifier: Any, rows: NDArray[Any], labels: NDArray[Any]) -> Scores:
    """Scores of a fitted scikit-learn ``classifier`` on rows [rows, hidden] and labels [rows].

    Raises:
        InvalidRows: labels that the classifier never saw.
    """
    classes = classifier.classes_
    unseen = np.setdiff1d(labels, classes)
    if len(unseen):
        raise InvalidRows(
            f"labels {unseen.tolist()} were not in training, which had {classes.tolist()}; no prediction can meet them."
        )
    ranking = _ranking(classifier, rows) if len(classes) == 2 else None
    return score_predictions(labels, classifier.predict(rows), ranking, classes[1])


def auroc(positive: NDArray[np.bool_], scores: NDArray[Any]) -> float:
    """Share of (positive, other) pairs that ``scores`` [rows] put in order, ties counting half.

    Mann & Whitney (1947). Both kinds of row must be there.
    """
    ranks = np.asarray(rankdata(scores))
    n_positive = int(positive.sum())
    pairs = n_positive * (len(positive) - n_positive)
    return (float(ranks[positive].sum()) - n_positive * (n_positive + 1) / 2) / pairs


def _ranking(classifier: Any, rows: NDArray[Any]) -> NDArray[Any] | None:
    if hasattr(classifier, "decision_function"):
        return np.asarray(classifier.decision_function(rows))
    if hasattr(classifier, "predict_proba"):
        return np.asarray(classifier.predict_proba(rows))[:, 1]
    return None
