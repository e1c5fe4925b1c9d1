"""The mass-mean probe is the difference of means, and a good scikit-learn citizen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.utils.estimator_checks import check_estimator

from streamtap.errors import InvalidRows
from streamtap.probes.lda import ShrinkageLda
from streamtap.probes.mass_mean import MassMeanClassifier

RANDOM = np.random.default_rng(0)


@pytest.mark.parametrize("estimator", [MassMeanClassifier(), ShrinkageLda()])
def test_scikit_learn_conformance(estimator: Any) -> None:
    # Checks for libraries that are not installed here leave themselves out, hence the count.
    results = check_estimator(estimator, on_skip=None)
    assert sum(result["status"] == "passed" for result in results) > 40


def test_direction_and_midpoint() -> None:
    rows = RANDOM.standard_normal((60, 5)) + 100.0
    labels = np.repeat([0, 1], [40, 20])
    rows[labels == 1] += [2.0, 0, 0, 0, -1.0]
    probe = MassMeanClassifier().fit(rows, labels)
    means = rows[labels == 0].mean(axis=0), rows[labels == 1].mean(axis=0)
    np.testing.assert_allclose(probe.coef_[0], means[1] - means[0], rtol=1e-9)
    midpoint = (means[0] + means[1]) / 2
    np.testing.assert_allclose(probe.decision_function(midpoint[None]), 0.0, atol=1e-9)
    np.testing.assert_allclose(probe.predict_proba(midpoint[None]), 0.5, atol=1e-9)


def test_more_classes_take_the_nearest_mean() -> None:
    labels = np.repeat(["x", "y", "z"], 30)
    rows = RANDOM.standard_normal((90, 4)) + np.repeat([[0, 0, 0, 0], [4, 0, 0, 0], [0, 4, 0, 0]], 30, axis=0)
    probe = MassMeanClassifier().fit(rows, labels)
    means = np.stack([rows[labels == label].mean(axis=0) for label in "xyz"])
    nearest = np.argmin(((rows[:, None] - means) ** 2).sum(axis=2), axis=1)
    assert probe.predict(rows).tolist() == np.array(["x", "y", "z"])[nearest].tolist()
    assert probe.predict_proba(rows).sum(axis=1) == pytest.approx(1.0)


def test_probabilities_are_calibrated_where_rows_are_many() -> None:
    labels = np.tile([0, 1], 4000)
    rows = RANDOM.standard_normal((8000, 3))
    rows[:, 0] += 1.5 * labels
    probabilities = MassMeanClassifier().fit(rows, labels).predict_proba(rows)[:, 1]
    for low, high in [(0.1, 0.3), (0.4, 0.6), (0.7, 0.9)]:
        inside = (probabilities > low) & (probabilities < high)
        assert labels[inside].mean() == pytest.approx(probabilities[inside].mean(), abs=0.05)


def test_equal_means_say_nothing() -> None:
    rows = np.array([[1.0, 0], [-1, 0], [1, 0], [-1, 0]])
    probe = MassMeanClassifier().fit(rows, [0, 0, 1, 1])
    np.testing.assert_allclose(probe.predict_proba(rows), 0.5)


def test_one_class_is_refused() -> None:
    with pytest.raises(InvalidRows, match="one class"):
        MassMeanClassifier().fit(np.ones((3, 2)), [1, 1, 1])
