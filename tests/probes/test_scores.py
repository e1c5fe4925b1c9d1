"""Scores that see imbalance."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.dummy import DummyClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from streamtap.errors import InvalidRows
from streamtap.probes.intervals import wilson
from streamtap.probes.scores import auroc, score_classifier, score_predictions

RARE = np.arange(300) % 33 == 0  # 10 of 300, 3 %


def test_a_useless_probe_on_rare_positives_looks_useless() -> None:
    rows = np.ones((300, 2))
    scores = score_classifier(DummyClassifier(strategy="most_frequent").fit(rows, RARE), rows, RARE)
    assert scores.counts == {False: 290, True: 10}
    assert scores.accuracy == scores.majority_rate == pytest.approx(290 / 300)
    assert scores.balanced_accuracy == 0.5
    assert scores.auroc == 0.5
    assert scores.interval == wilson(290, 300)


def test_a_perfect_ranking_below_the_threshold_shows_in_auroc_alone() -> None:
    rows = np.column_stack([RARE * 0.1, np.zeros(300)])
    scores = score_classifier(LogisticRegression(C=1e-3).fit(rows, RARE), rows, RARE)
    assert scores.auroc == 1.0
    assert scores.balanced_accuracy == 0.5


@pytest.mark.parametrize("seed", range(5))
def test_auroc_with_ties_is_scikit_learns(seed: int) -> None:
    random = np.random.default_rng(seed)
    positive, ranking = random.random(50) < 0.3, random.integers(0, 6, 50)
    assert auroc(positive, ranking) == pytest.approx(roc_auc_score(positive, ranking), rel=1e-12)


def test_string_labels_rank_towards_the_second_class() -> None:
    labels = np.array(["yes", "no", "yes", "no"])
    rows = np.array([[2.0], [-2.0], [1.5], [-1.0]])
    assert score_classifier(LogisticRegression().fit(rows, labels), rows, labels).auroc == 1.0


def test_three_classes_and_one_class_have_no_auroc() -> None:
    labels = np.array([0, 1, 2, 2])
    scores = score_predictions(labels, np.array([0, 1, 2, 0]))
    assert (scores.auroc, scores.correct, scores.balanced_accuracy) == (None, 3, pytest.approx(2.5 / 3))
    classifier = LogisticRegression().fit([[0.0], [1.0]], [0, 1])
    assert score_classifier(classifier, np.array([[5.0]]), np.array([1])).auroc is None


def test_labels_never_trained_on_are_refused() -> None:
    classifier = LogisticRegression().fit([[0.0], [1.0]], [0, 1])
    with pytest.raises(InvalidRows, match=r"labels \[2\] were not in training, which had \[0, 1\]"):
        score_classifier(classifier, np.array([[0.0], [1.0]]), np.array([0, 2]))
    with pytest.raises(InvalidRows, match="got 1 for 0 labels"):
        score_predictions(np.array([]), np.array([1]))
