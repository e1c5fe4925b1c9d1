"""LDA in its quick form solves the textbook equations."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.covariance import ledoit_wolf_shrinkage
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from streamtap.errors import InvalidInput
from streamtap.probes.lda import ShrinkageLda, ledoit_wolf

RANDOM = np.random.default_rng(1)


def blobs(n: int, hidden: int, classes: int = 2) -> tuple[np.ndarray, np.ndarray]:
    labels = np.arange(n) % classes
    mixing = RANDOM.standard_normal((hidden, hidden)) / np.sqrt(hidden)
    rows = RANDOM.standard_normal((n, hidden)) @ mixing + RANDOM.standard_normal((classes, hidden))[labels] + 3.0
    return rows, labels


@pytest.mark.parametrize(("n", "hidden"), [(20, 60), (60, 20), (40, 40)])
def test_ledoit_wolf_weight_is_scikit_learns(n: int, hidden: int) -> None:
    rows = RANDOM.standard_normal((n, hidden)) * np.linspace(0.5, 3, hidden)
    assert ledoit_wolf(rows) == pytest.approx(ledoit_wolf_shrinkage(rows, assume_centered=True), rel=1e-9)


@pytest.mark.parametrize(("n", "hidden"), [(30, 80), (200, 20)])
@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("shrinkage", ["auto", 0.3])
def test_scores_are_the_log_odds_of_the_shrunk_gaussian(
    n: int, hidden: int, classes: int, shrinkage: str | float
) -> None:
    rows, labels = blobs(n, hidden, classes)
    probe = ShrinkageLda(shrinkage).fit(rows, labels)
    means = np.stack([rows[labels == k].mean(axis=0) for k in range(classes)])
    within = rows - means[labels]
    covariance = within.T @ within / n
    weight = probe.shrinkage_
    shrunk = (1 - weight) * covariance + weight * np.trace(covariance) / hidden * np.eye(hidden)
    logs = np.stack(
        [
            np.log(np.mean(labels == k)) - 0.5 * np.einsum("ij,ji->i", rows - m, np.linalg.solve(shrunk, (rows - m).T))
            for k, m in enumerate(means)
        ],
        axis=1,
    )
    expected = np.exp(logs - logs.max(axis=1, keepdims=True))
    expected /= expected.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(probe.predict_proba(rows), expected, atol=1e-8)


def test_agrees_with_scikit_learn_on_unseen_rows() -> None:
    rows, labels = blobs(400, 150)
    train, test = slice(0, 100), slice(100, 400)
    ours = ShrinkageLda().fit(rows[train], labels[train]).predict(rows[test])
    theirs = LinearDiscriminantAnalysis(solver="eigen", shrinkage="auto").fit(rows[train], labels[train])
    assert np.mean(ours == theirs.predict(rows[test])) > 0.93
    assert np.mean(ours == labels[test]) > 0.9


def test_classes_without_spread_are_told_apart() -> None:
    probe = ShrinkageLda().fit([[0.0, 1], [0, 1], [5, 1], [5, 1]], [0, 0, 1, 1])
    assert probe.predict([[1.0, 1], [4.0, 1]]).tolist() == [0, 1]


@pytest.mark.parametrize("shrinkage", [0.0, 1.5, "some"])
def test_a_shrinkage_that_means_nothing(shrinkage: str | float) -> None:
    with pytest.raises(InvalidInput, match=r"shrinkage must be 'auto' or a number in \(0, 1\]"):
        ShrinkageLda(shrinkage).fit(*blobs(10, 4))
