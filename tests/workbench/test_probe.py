"""A probe learns from any kind of rows, says what it knows, and refuses what it cannot."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import GaussianNB

from streamtap.activations import Activations, Provenance
from streamtap.errors import InvalidInput, InvalidRows, Unsupported
from streamtap.workbench.probe import Probe

NAMES = ("logistic_regression", "ridge", "lda", "mass_mean")


def task(n: int = 240, hidden: int = 48, shift: float = 3.0, seed: int = 0) -> tuple[Any, Any]:
    """Rows like a residual stream's: offset columns of unequal spread, the label along one direction."""
    random = np.random.default_rng(seed)
    labels = np.arange(n) % 2
    spread = np.exp(random.standard_normal(hidden))
    rows = random.standard_normal((n, hidden)) * spread + 10 * random.standard_normal(hidden)
    direction = np.random.default_rng(99).standard_normal(hidden)
    rows += shift * np.outer(labels, direction / np.linalg.norm(direction) * spread)
    return rows.astype(np.float32), labels


ROWS, LABELS = task()
TRAIN, TEST = slice(0, 160), slice(160, 240)


def as_activations(layers: dict[int, Any]) -> Activations:
    n = len(next(iter(layers.values())))
    ids = np.zeros(n, np.int32)
    origin = Provenance(model="m", commit="c", tokenizer="t", dtype="float32")
    return Activations(layers, np.arange(n + 1), ids, ids, origin, pooling="last_token")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("preprocessing", ["standard", "standard+pca:40"])
def test_every_classifier_finds_the_direction(name: str, preprocessing: str) -> None:
    probe = Probe(name, random_state=42, preprocessing=preprocessing).fit_from_activations(ROWS[TRAIN], LABELS[TRAIN])
    accuracy = probe.score_from_activations(ROWS[TEST], LABELS[TEST])
    assert isinstance(accuracy, float)
    assert accuracy > 0.8
    assert probe.direction_ is not None
    side = ROWS[TEST] @ probe.direction_ + probe.intercept_ > 0
    assert np.array_equal(probe.classes_[side.astype(int)], probe.predict_from_activations(ROWS[TEST]))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "labels", [LABELS, LABELS.astype(bool), np.where(LABELS, "true", "false"), LABELS.astype(float), LABELS.tolist()]
)
def test_labels_come_back_as_they_came(name: str, labels: Any) -> None:
    probe = Probe(name).fit_from_activations(ROWS, labels)
    predicted = probe.predict_from_activations(ROWS)
    assert predicted.dtype == np.asarray(labels).dtype
    assert set(predicted.tolist()) == set(np.asarray(labels).tolist())
    assert np.mean(predicted == np.asarray(labels)) > 0.85


def test_all_kinds_of_rows_predict_alike() -> None:
    half = ROWS.astype(ml_dtypes.bfloat16)
    exact = half.astype(np.float32)
    probe = Probe(random_state=0).fit_from_activations(exact, LABELS)
    expected = probe.predict_from_activations(exact)
    for rows in (half, torch.tensor(exact).bfloat16(), torch.tensor(exact, requires_grad=True), exact.tolist()):
        assert np.array_equal(probe.predict_from_activations(rows), expected)


def test_activations_by_layer() -> None:
    held = as_activations({3: np.zeros_like(ROWS) + 1, 9: ROWS})
    probe = Probe().fit_from_activations(held, LABELS, layer=9)
    assert probe.layer_ == 9
    assert probe.score_from_activations(held, LABELS) == probe.score_from_activations(ROWS, LABELS) > 0.9
    with pytest.raises(InvalidRows, match=r"hold layers \[3\], not layer 9"):
        probe.predict_from_activations(as_activations({3: ROWS}))
    with pytest.raises(InvalidRows, match="name one with layer="):
        Probe().fit_from_activations(held, LABELS)


@pytest.mark.parametrize("classifier", ["logistic_regression", "lda", "mass_mean", GaussianNB()])
def test_probabilities_stand_in_the_order_of_classes(classifier: Any) -> None:
    labels = np.array(["a", "b", "c"])[np.arange(240) % 3]
    rows = ROWS + 4 * np.eye(48, dtype=np.float32)[np.arange(240) % 3] * ROWS.std(axis=0)
    probe = Probe(classifier).fit_from_activations(rows, labels)
    probabilities = probe.predict_proba_from_activations(rows)
    assert probabilities.shape == (240, 3)
    assert probabilities.dtype == np.float64
    np.testing.assert_allclose(probabilities.sum(axis=1), 1.0, atol=1e-5)
    assert np.array_equal(probe.classes_[probabilities.argmax(axis=1)], probe.predict_from_activations(rows))
    assert np.mean(probe.predict_from_activations(rows) == labels) > 0.9
    assert probe.direction_ is None


def test_ridge_has_no_probabilities_and_says_what_has() -> None:
    probe = Probe("ridge").fit_from_activations(ROWS, LABELS)
    with pytest.raises(Unsupported, match="'ridge' gives no probabilities; use 'logistic_regression'"):
        probe.predict_proba_from_activations(ROWS)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_an_unscaled_column_is_told_by_convergence_and_healed_by_scaling() -> None:
    rows = ROWS.copy()
    rows[:, 0] = 3000 + 500 * np.random.default_rng(1).standard_normal(len(rows))

    def fitted(preprocessing: str) -> Probe:
        kwargs = {"max_iter": 100, "tol": 1e-6}
        return Probe(classifier_kwargs=kwargs, preprocessing=preprocessing).fit_from_activations(rows, LABELS)

    raw, scaled = fitted("none"), fitted("standard")
    assert (raw.converged_, raw.n_iter_) == (False, 100)
    assert scaled.converged_ is True
    assert scaled.n_iter_ is not None
    assert scaled.n_iter_ < 100
    assert Probe("mass_mean").fit_from_activations(rows, LABELS).converged_ is None


def test_three_percent_of_positives() -> None:
    random = np.random.default_rng(3)
    labels = np.arange(600) % 33 == 0
    noise = random.standard_normal((600, 4))
    plain = Probe(classifier_kwargs={"C": 0.01}).fit_from_activations(noise, labels)
    scores = plain.evaluate_from_activations(noise, labels)
    assert scores.counts == {False: 581, True: 19}
    assert scores.accuracy == scores.majority_rate == pytest.approx(0.968, abs=1e-3)
    assert scores.balanced_accuracy == 0.5
    assert scores.auroc == pytest.approx(0.5, abs=0.2)
    weighted = Probe(classifier_kwargs={"C": 0.01, "class_weight": "balanced"}).fit_from_activations(noise, labels)
    assert weighted.direction_ is not None
    assert not np.allclose(weighted.direction_, plain.direction_)
    assert weighted.predict_from_activations(noise).sum() > 100


def test_scaling_is_learnt_from_training_rows_only() -> None:
    probe = Probe().fit_from_activations(ROWS[TRAIN], LABELS[TRAIN])
    alone = np.concatenate([probe.predict_proba_from_activations(ROWS[i : i + 1]) for i in range(160, 240)])
    np.testing.assert_allclose(alone, probe.predict_proba_from_activations(ROWS[TEST]), rtol=1e-4, atol=1e-7)


def test_fitting_twice_is_fitting_once_and_the_estimator_given_is_left_alone() -> None:
    mine = LogisticRegression(C=0.1)
    probe = Probe(mine, random_state=1).fit_from_activations(*task(seed=5)).fit_from_activations(ROWS, LABELS)
    once = Probe("logistic_regression", random_state=1, classifier_kwargs={"C": 0.1}).fit_from_activations(ROWS, LABELS)
    assert np.array_equal(probe.direction_, once.direction_)
    assert not hasattr(mine, "coef_")
    assert repr(once) == "Probe(classifier='logistic_regression', preprocessing='standard'; fitted on 48 columns)"


@pytest.mark.parametrize("method", ["predict_from_activations", "predict_proba_from_activations"])
def test_before_fit(method: str) -> None:
    with pytest.raises(InvalidInput, match="not fitted yet; call fit_from_activations"):
        getattr(Probe(), method)(ROWS)
    with pytest.raises(InvalidInput, match="not fitted yet"):
        Probe().score_from_activations(ROWS, LABELS)


@pytest.mark.parametrize(
    ("rows", "labels", "message"),
    [
        (ROWS[0], LABELS[:1], "1-D|for a single row"),
        (ROWS, np.ones(240, int), "all 240 labels are 1"),
        (ROWS, LABELS[:5], "for each of the 240 rows; got 5"),
        (np.where(np.arange(240)[:, None] == 17, np.nan, ROWS), LABELS, "row 17 holds NaN"),
        (ROWS, LABELS / 2, "label 1 is 0.5, a fraction"),
    ],
)
def test_what_cannot_be_learnt_from(rows: Any, labels: Any, message: str) -> None:
    with pytest.raises(InvalidRows, match=message):
        Probe().fit_from_activations(rows, labels)


def test_rows_of_another_width() -> None:
    probe = Probe().fit_from_activations(ROWS, LABELS)
    with pytest.raises(InvalidRows, match="fitted on rows 48 wide; got 47"):
        probe.predict_from_activations(ROWS[:, :47])


def test_a_failed_fit_leaves_the_earlier_one() -> None:
    probe = Probe().fit_from_activations(ROWS, LABELS)
    before = probe.predict_from_activations(ROWS)
    with pytest.raises(InvalidRows):
        probe.fit_from_activations(ROWS, LABELS[:3])
    assert np.array_equal(probe.predict_from_activations(ROWS), before)


def test_unknown_parameters_are_not_accepted_silently() -> None:
    with pytest.raises(TypeError):
        Probe(poling="mean")  # type: ignore[call-arg]
