"""Names to pipelines, convergence told, and wrong asks refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.svm import LinearSVC

from streamtap.errors import InvalidInput, InvalidRows
from streamtap.probes.estimators import CLASSIFIERS, convergence, fit_classifier, make_classifier
from streamtap.probes.linear import raw_direction

RANDOM = np.random.default_rng(2)
LABELS = np.arange(80) % 2
ROWS = (RANDOM.standard_normal((80, 12)) * np.linspace(1, 50, 12) + 20).astype(np.float32)
ROWS[:, 3] += 10 * LABELS


@pytest.mark.parametrize("name", CLASSIFIERS)
@pytest.mark.parametrize("preprocessing", ["none", "standard", "pca:5", "standard+pca:5"])
def test_the_folded_direction_is_the_decision_function(name: str, preprocessing: str) -> None:
    pipeline = fit_classifier(make_classifier(name, 0, None, preprocessing), ROWS.astype(np.float64), LABELS)
    folded = raw_direction(pipeline)
    assert folded is not None
    decision = pipeline.decision_function(ROWS.astype(np.float64))
    np.testing.assert_allclose(ROWS @ folded[0] + folded[1], decision, rtol=1e-6, atol=1e-6 * np.abs(decision).max())


def test_no_single_direction() -> None:
    three = fit_classifier(make_classifier("ridge"), ROWS, np.arange(80) % 3)
    neighbours = fit_classifier(make_classifier(KNeighborsClassifier()), ROWS, LABELS)
    assert raw_direction(three) is None
    assert raw_direction(neighbours) is None


def test_an_estimator_is_cloned_and_gets_the_random_state() -> None:
    mine = LogisticRegression(C=0.25)
    pipeline = make_classifier(mine, 7, {"max_iter": 50})
    assert pipeline[-1] is not mine
    assert (pipeline[-1].C, pipeline[-1].random_state, pipeline[-1].max_iter) == (0.25, 7, 50)
    assert mine.random_state is None
    assert make_classifier(LogisticRegression(random_state=3), 7)[-1].random_state == 3


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_convergence_is_told_where_the_solver_knows() -> None:
    def told(classifier: Any, **kwargs: Any) -> tuple[bool | None, int | None]:
        return convergence(fit_classifier(make_classifier(classifier, 0, kwargs), ROWS, LABELS))

    assert told("logistic_regression", max_iter=2) == (False, 2)
    assert told("logistic_regression")[0] is True
    assert told(LinearSVC(max_iter=1)) == (False, 1)
    assert told("mass_mean") == told("lda") == told("ridge") == (None, None)
    # A booster's iterations are its trees: using all of them up is no failure.
    assert told(HistGradientBoostingClassifier(max_iter=3)) == (None, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"classifier": "svm"}, "one of logistic_regression, ridge, lda, mass_mean or a scikit-learn classifier"),
        ({"classifier": LogisticRegression}, r"write LogisticRegression\(\)"),
        ({"classifier": LinearRegression()}, "LinearRegression is a regressor"),
        ({"classifier": object()}, "object lacks fit, predict"),
        ({"classifier_kwargs": {"c": 1}}, "logistic_regression has no parameter c; it takes C, class_weight"),
        ({"preprocessing": "pca"}, "preprocessing must be"),
        ({"preprocessing": "pca:0"}, "preprocessing must be"),
        ({"preprocessing": "none+pca:3"}, "preprocessing must be"),
        ({"preprocessing": None}, "preprocessing must be"),
    ],
)
def test_what_is_no_classifier_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        make_classifier(**arguments)


def test_what_only_the_rows_can_tell_is_refused_in_fit() -> None:
    with pytest.raises(InvalidRows, match="pca:13 needs at least 13 rows and columns"):
        fit_classifier(make_classifier(preprocessing="pca:13"), ROWS, LABELS)
    with pytest.raises(InvalidInput, match=r"LogisticRegression could not be fitted: .*'C'"):
        fit_classifier(make_classifier(classifier_kwargs={"C": -1.0}), ROWS, LABELS)
