"""What the same estimator reaches when there is nothing to learn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import clone

from streamtap.errors import InvalidInput
from streamtap.probes.estimators import Estimator, fit_classifier
from streamtap.probes.parallel import run_all


@dataclass(frozen=True)
class Control:
    """Test accuracies of probes trained on shuffled labels.

    ``mean`` and ``interval`` (its middle 95 %) describe ``accuracies``, one a shuffle: a real probe
    whose accuracy lies inside the interval has shown nothing.
    """

    accuracies: tuple[float, ...]
    mean: float
    interval: tuple[float, float]


def shuffled_labels(
    classifier: Estimator,
    train_rows: NDArray[Any],
    train_labels: NDArray[Any],
    test_rows: NDArray[Any],
    test_labels: NDArray[Any],
    repeats: int = 20,
    random_state: int = 0,
    done: Callable[[], None] | None = None,
) -> Control:
    """Train clones of ``classifier`` on permuted labels and score them on the true test labels.

    Rows are [rows, hidden], labels [rows]. Each label stays as frequent as it was, so an imbalance
    shows in the control as it does in the probe. ``done`` is called after each of ``repeats``.

    Raises:
        InvalidInput: ``repeats`` is below 2.
    """
    if repeats < 2:
        raise InvalidInput(f"the shuffled-label control needs repeats of 2 or more; got {repeats}.")
    seeds = np.random.SeedSequence(random_state).spawn(repeats)
    jobs = [
        partial(_accuracy_once, classifier, train_rows, train_labels, test_rows, test_labels, seed) for seed in seeds
    ]
    accuracies = run_all(jobs, done)
    low, high = np.quantile(accuracies, [0.025, 0.975])
    return Control(tuple(accuracies), float(np.mean(accuracies)), (float(low), float(high)))


def _accuracy_once(
    classifier: Estimator,
    train_rows: NDArray[Any],
    train_labels: NDArray[Any],
    test_rows: NDArray[Any],
    test_labels: NDArray[Any],
    seed: np.random.SeedSequence,
) -> float:
    shuffled = np.random.default_rng(seed).permutation(train_labels)
    fitted = fit_classifier(clone(classifier), train_rows, shuffled)
    return float(np.mean(fitted.predict(test_rows) == test_labels))
