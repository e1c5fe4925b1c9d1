from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from streamtap.errors import InvalidRows
from streamtap.workbench.by_subject import score_by_subject
from streamtap.workbench.statements import Statements
from streamtap.workbench.sweep import Sweep

Rows = dict[int, NDArray[np.float32]]


def test_subjects_add_up_to_the_test_score(statements: Statements, telling_rows: Rows, telling_sweep: Sweep) -> None:
    assert telling_sweep.best_layer == 1
    scores = score_by_subject(telling_sweep, telling_rows[1], statements.labels, statements.subjects)
    assert sum(score.n for score in scores.values()) == telling_sweep.best.test.n
    assert sum(score.correct for score in scores.values()) == telling_sweep.best.test.correct
    assert list(scores) == [name for name in dict.fromkeys(statements.subjects) if name in scores]


def test_each_subject_is_scored_on_its_own_rows(
    statements: Statements, telling_rows: Rows, telling_sweep: Sweep
) -> None:
    scores = score_by_subject(telling_sweep, telling_rows[1], statements.labels, statements.subjects)
    for name, score in scores.items():
        held_out = [int(statements.labels[i]) for i in telling_sweep.split.test if statements.subjects[i] == name]
        assert score.n == len(held_out)
        assert score.counts[1] == sum(held_out)


def test_a_subject_without_test_rows_is_left_out(
    statements: Statements, telling_rows: Rows, telling_sweep: Sweep
) -> None:
    subjects = ["kept"] * len(statements)
    for i in telling_sweep.split.train[:10]:
        subjects[i] = "trained on only"
    assert list(score_by_subject(telling_sweep, telling_rows[1], statements.labels, subjects)) == ["kept"]


def test_rows_of_another_layer_are_refused(statements: Statements, telling_rows: Rows, telling_sweep: Sweep) -> None:
    with pytest.raises(InvalidRows, match="test rows right at layer 1, these rows give"):
        score_by_subject(telling_sweep, telling_rows[0], statements.labels, statements.subjects)


def test_too_few_subjects_are_refused(statements: Statements, telling_rows: Rows, telling_sweep: Sweep) -> None:
    with pytest.raises(InvalidRows, match="one for each of the 624 prompts; got 3"):
        score_by_subject(telling_sweep, telling_rows[1], statements.labels, ["a", "b", "c"])
