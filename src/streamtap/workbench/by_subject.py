"""The chosen layer's test rows, subject by subject."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamtap.errors import InvalidRows
from streamtap.probes.estimators import Estimator, fit_classifier, make_classifier
from streamtap.probes.labels import read_labels
from streamtap.probes.parallel import run_all
from streamtap.probes.rows import read_rows
from streamtap.probes.scores import Scores, score_predictions
from streamtap.workbench.sweep import Sweep


def score_by_subject(
    sweep: Sweep,
    rows: Any,
    labels: Any,
    subjects: Sequence[str],
    classifier: str | Estimator = "logistic_regression",
    *,
    classifier_kwargs: Mapping[str, Any] | None = None,
    preprocessing: str = "standard",
) -> dict[str, Scores]:
    """Test scores of the sweep's chosen layer for each subject, in order of first appearance.

    ``rows`` [prompts, hidden] are that layer's; they, ``labels`` and the classifier's arguments are
    those that the sweep was given. The probe is fitted again as the sweep fitted it. A subject
    without a test row is left out.

    Raises:
        InvalidRows: lengths that differ, or rows on which the sweep's result does not come out again.
    """
    table = read_rows(rows)
    answers = read_labels(labels, len(table))
    if len(subjects) != len(table):
        raise InvalidRows(f"subjects: expected one for each of the {len(table)} prompts; got {len(subjects)}.")
    probe = make_classifier(classifier, sweep.random_state, classifier_kwargs, preprocessing)
    fitting = np.concatenate([sweep.split.train, sweep.split.validation])
    # Through run_all, whose single-threaded algebra makes the fit the sweep's own to the bit.
    fitted = run_all([partial(fit_classifier, probe, table[fitting], answers[fitting])])[0]
    test = sweep.split.test
    predicted = fitted.predict(table[test])
    _check_same(sweep, int(np.sum(predicted == answers[test])))
    return _by_name(np.asarray(subjects)[test], answers[test], predicted, list(dict.fromkeys(subjects)))


def _by_name(
    names: NDArray[Any], labels: NDArray[Any], predicted: NDArray[Any], order: Sequence[str]
) -> dict[str, Scores]:
    return {
        name: score_predictions(labels[names == name], predicted[names == name])
        for name in order
        if np.any(names == name)
    }


def _check_same(sweep: Sweep, correct: int) -> None:
    expected = sweep.best.test.correct
    if correct != expected:
        raise InvalidRows(
            f"the sweep had {expected} of {sweep.best.test.n} test rows right at layer {sweep.best_layer}, these rows "
            f"give {correct}; pass that layer's rows, and the labels and classifier of the sweep."
        )
