"""A sweep finds the layer that knows, and reports nothing where none does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression

from streamtap.errors import InvalidInput, InvalidRows
from streamtap.probes import parallel
from streamtap.probes.estimators import make_classifier
from streamtap.probes.splits import grouped_split
from streamtap.workbench import sweep as sweep_module
from streamtap.workbench.sweep import Sweep, sweep_layers

N, HIDDEN = 240, 24
LABELS = np.arange(N) % 2
GROUPS = np.arange(N) // 4
TEXTS = [f"statement about thing{i % 17} and thing{(i * 5) % 23}" for i in range(N)]


def layers_with_knowledge(strength: dict[int, float], seed: int = 0) -> dict[int, Any]:
    random = np.random.default_rng(seed)
    rows = {}
    for layer, shift in strength.items():
        rows[layer] = random.standard_normal((N, HIDDEN)).astype(np.float32)
        rows[layer][:, layer % HIDDEN] += shift * (2 * LABELS - 1)
    return rows


def test_the_layer_that_knows_is_chosen_above_control_and_chance() -> None:
    sweep = sweep_layers(layers_with_knowledge({0: 0, 1: 0.2, 2: 3.0, 3: 0.6}), LABELS, GROUPS, TEXTS)
    assert sweep.best_layer == 2
    assert [score.layer for score in sweep.layers if score.chosen] == [2]
    assert sweep.best.test.n == len(sweep.split.test)
    low = sweep.best.test.interval[0]
    assert low > sweep.control.interval[1]
    assert low > sweep.majority.accuracy
    assert sweep.bag_of_words is not None
    assert low > sweep.bag_of_words.interval[0]
    assert sweep.layers[0].test.accuracy < 0.7
    assert all(score.converged for score in sweep.layers)


def test_noise_is_near_chance_though_its_best_layer_on_test_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_module, "_SHUFFLES", 2)
    labels = np.arange(1000) % 2
    chosen, best_on_test = [], []
    for seed in range(4):
        random = np.random.default_rng(seed)
        rows = {layer: random.standard_normal((1000, 8)) for layer in range(32)}
        sweep = sweep_layers(rows, labels, range(1000), classifier="mass_mean", random_state=seed)
        chosen.append(sweep.best.test.accuracy)
        best_on_test.append(max(score.test.accuracy for score in sweep.layers))
    # 4 x 250 test rows: one standard error is 0.016.
    assert np.mean(chosen) == pytest.approx(0.5, abs=0.04)
    # What choosing on the test rows would have shown: the bias that the sweep avoids.
    assert np.mean(best_on_test) > 0.55


def test_every_number_can_be_made_again_from_the_split() -> None:
    rows = layers_with_knowledge({4: 0.5, 8: 1.0})
    sweep = sweep_layers(rows, LABELS, GROUPS, classifier="ridge", random_state=3)
    split = grouped_split(GROUPS, LABELS, random_state=3)
    assert np.array_equal(sweep.split.test, split.test)
    both = np.concatenate([split.train, split.validation])
    for score in sweep.layers:
        chooser = make_classifier("ridge", 3).fit(rows[score.layer][split.train], LABELS[split.train])
        final = make_classifier("ridge", 3).fit(rows[score.layer][both], LABELS[both])
        assert score.validation.accuracy == chooser.score(rows[score.layer][split.validation], LABELS[split.validation])
        assert score.test.accuracy == final.score(rows[score.layer][split.test], LABELS[split.test])


def test_test_rows_have_no_say_in_the_choice_nor_in_the_fit() -> None:
    rows = layers_with_knowledge({0: 0.4, 1: 0.6, 2: 0.5})
    first = sweep_layers(rows, LABELS, GROUPS)
    ruined = {layer: table.copy() for layer, table in rows.items()}
    for table in ruined.values():
        table[first.split.test] = 1e3
    second = sweep_layers(ruined, LABELS, GROUPS)
    assert second.best_layer == first.best_layer
    assert [s.validation for s in second.layers] == [s.validation for s in first.layers]
    assert second.best.test.accuracy == pytest.approx(0.5, abs=0.05)


def test_of_equals_the_lowest_layer() -> None:
    one = layers_with_knowledge({5: 1.0})[5]
    assert sweep_layers({9: one, 5: one, 7: one}, LABELS, GROUPS, classifier="mass_mean").best_layer == 5


def test_groups_stay_whole_and_the_result_repeats() -> None:
    def run() -> Sweep:
        return sweep_layers(layers_with_knowledge({0: 0.5, 1: 0.5}), LABELS, GROUPS, TEXTS, random_state=1)

    first, again = run(), run()
    assert not set(GROUPS[first.split.test]) & set(GROUPS[first.split.train])
    assert (first.layers, first.control, first.bag_of_words) == (again.layers, again.control, again.bag_of_words)


def test_a_give_away_word_is_shown() -> None:
    texts = [text + (" indeed" if label else " maybe") for text, label in zip(TEXTS, LABELS, strict=True)]
    sweep = sweep_layers(layers_with_knowledge({0: 0.0}), LABELS, GROUPS, texts, classifier="mass_mean")
    assert sweep.bag_of_words is not None
    assert sweep.bag_of_words.accuracy == 1.0
    assert sweep.best.test.accuracy < 0.7


def test_string_labels_and_an_estimator_of_ones_own() -> None:
    labels = np.where(LABELS, "true", "false")
    mine = LogisticRegression(C=0.1)
    sweep = sweep_layers(layers_with_knowledge({0: 2.0}), labels.tolist(), GROUPS, classifier=mine)
    assert sweep.best.test.accuracy > 0.9
    assert set(sweep.best.test.counts) == {"true", "false"}
    assert sweep.classifier == "LogisticRegression"
    assert sweep.bag_of_words is None
    assert sweep.text_length is None


def test_no_convergence_is_told_without_a_shower_of_warnings(recwarn: pytest.WarningsRecorder) -> None:
    sweep = sweep_layers(layers_with_knowledge({0: 1.0}), LABELS, GROUPS, classifier_kwargs={"max_iter": 1})
    assert sweep.best.converged is False
    assert len(recwarn) == 0


def test_progress_counts_to_its_total_in_the_callers_thread() -> None:
    told: list[tuple[int, int]] = []
    sweep_layers(
        layers_with_knowledge({0: 1.0, 1: 1.0}),
        LABELS,
        GROUPS,
        classifier="mass_mean",
        progress=lambda done, total: told.append((done, total)),
    )
    assert told == [(i, 22) for i in range(1, 23)]


class OneAtATime(Mapping[int, Any]):
    """Rows of 40 layers, made when asked for, which is noted."""

    def __init__(self) -> None:
        self.made: list[int] = []

    def __getitem__(self, layer: int) -> Any:
        self.made.append(layer)
        return layers_with_knowledge({layer: 1.0})[layer]

    def __iter__(self) -> Iterator[int]:
        return iter(range(40))

    def __len__(self) -> int:
        return 40


def test_layers_are_read_one_by_one_while_others_are_fitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "_cores", lambda: 2)
    rows = OneAtATime()
    ahead: list[int] = []

    def done(count: int, _: int) -> None:
        ahead.append(len(rows.made) - count)

    sweep_layers(rows, LABELS, GROUPS, classifier="mass_mean", progress=done)
    assert sorted(set(rows.made)) == list(range(40))
    assert max(ahead) <= 6


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"rows": {}}, InvalidInput, "at least one layer"),
        ({"rows": {0: np.ones((N, 3)), 1: np.ones((N - 1, 3))}}, InvalidRows, "layer 1 holds 239 rows"),
        ({"rows": {0: np.full((N, 3), np.nan)}}, InvalidRows, "layer 0: row 0 holds NaN"),
        ({"labels": LABELS[:-1]}, InvalidRows, "for each of the 240 rows; got 239"),
        ({"groups": GROUPS[:-1]}, InvalidRows, "groups: expected one for each of the 240 prompts; got 239"),
        ({"texts": TEXTS[:-1]}, InvalidRows, "texts: expected one for each of the 240 prompts; got 239"),
        ({"groups": np.zeros(N)}, InvalidRows, "at least 3 groups"),
        ({"classifier": "svm"}, InvalidInput, "classifier must be one of"),
        ({"labels": np.ones(N, int)}, InvalidRows, "all 240 labels are 1"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {"rows": layers_with_knowledge({0: 1.0}), "labels": LABELS, "groups": GROUPS}
    with pytest.raises(error, match=message):
        sweep_layers(**(arguments | change))
