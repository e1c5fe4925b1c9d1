"""The control: nothing is learnt from shuffled labels, and imbalance shows in it."""

from __future__ import annotations

import numpy as np
import pytest

from streamtap.errors import InvalidInput
from streamtap.probes.controls import shuffled_labels
from streamtap.probes.estimators import fit_classifier, make_classifier

RANDOM = np.random.default_rng(5)


def test_a_separable_task_falls_to_chance() -> None:
    labels = np.arange(300) % 2
    rows = RANDOM.standard_normal((300, 20))
    rows[:, 0] += 8 * labels
    train, test = slice(0, 200), slice(200, 300)
    true = fit_classifier(make_classifier("mass_mean"), rows[train], labels[train])
    control = shuffled_labels(make_classifier("mass_mean"), rows[train], labels[train], rows[test], labels[test], 60)
    assert np.mean(true.predict(rows[test]) == labels[test]) > 0.95
    assert control.mean == pytest.approx(0.5, abs=0.15)
    assert control.interval[0] < 0.5 < control.interval[1]
    assert len(control.accuracies) == 60


def test_imbalance_shows_and_the_result_repeats() -> None:
    labels = np.arange(200) % 20 == 0
    rows = RANDOM.standard_normal((200, 3))
    arguments = (make_classifier(), rows[:100], labels[:100], rows[100:], labels[100:], 5)
    first, again = shuffled_labels(*arguments), shuffled_labels(*arguments)
    assert first == again
    assert first.mean == pytest.approx(0.95)


def test_the_estimator_given_stays_unfitted() -> None:
    blank = make_classifier("ridge")
    calls: list[int] = []
    shuffled_labels(
        blank, np.eye(4), np.array([0, 1, 0, 1]), np.eye(4), np.array([0, 1, 0, 1]), 3, 0, lambda: calls.append(1)
    )
    assert not hasattr(blank[-1], "coef_")
    assert len(calls) == 3


def test_one_repeat_is_no_control() -> None:
    with pytest.raises(InvalidInput, match="repeats of 2 or more; got 1"):
        shuffled_labels(make_classifier(), np.eye(2), np.array([0, 1]), np.eye(2), np.array([0, 1]), 1)
