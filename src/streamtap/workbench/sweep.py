"""Which layer knows: one probe a layer, the best layer chosen without the test rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamtap.errors import InvalidInput, InvalidRows
from streamtap.probes.baselines import bag_of_words, majority, text_length
from streamtap.probes.controls import Control, shuffled_labels
from streamtap.probes.estimators import Estimator, convergence, fit_classifier, make_classifier, name_of
from streamtap.probes.labels import Labels, read_labels
from streamtap.probes.parallel import run_all
from streamtap.probes.rows import Rows, read_rows
from streamtap.probes.scores import Scores, score_classifier
from streamtap.probes.splits import Split, grouped_split

#: Told after each finished fit: how many are done, and of how many.
Progress = Callable[[int, int], None]

_SHUFFLES = 20


@dataclass(frozen=True)
class LayerScore:
    """One layer's probe: ``validation`` chose, ``test`` reports.

    ``validation`` scores a probe fitted on the training rows, ``test`` one refitted on training and
    validation rows. ``converged`` is None where the solver does not say. ``chosen`` marks the layer
    of the best validation accuracy; only its ``test`` is free of the bias of picking a best one.
    """

    layer: int
    validation: Scores
    test: Scores
    converged: bool | None
    chosen: bool = False


@dataclass(frozen=True, eq=False)
class Sweep:
    """Result of ``sweep_layers``; all numbers but the layers' ``validation`` are on the same test rows.

    ``layers`` holds one entry a layer, ascending. ``control`` is the chosen layer's estimator on
    shuffled labels. ``bag_of_words`` and ``text_length`` are None where no texts were given.
    """

    layers: tuple[LayerScore, ...]
    best_layer: int
    split: Split
    classifier: str
    random_state: int
    control: Control
    majority: Scores
    bag_of_words: Scores | None = None
    text_length: Scores | None = None

    @property
    def best(self) -> LayerScore:
        """The chosen layer's scores."""
        return next(score for score in self.layers if score.chosen)


def sweep_layers(
    rows: Mapping[int, Any],
    labels: Any,
    groups: Sequence[Any] | NDArray[Any],
    texts: Sequence[str] | None = None,
    classifier: str | Estimator = "logistic_regression",
    random_state: int = 0,
    progress: Progress | None = None,
    *,
    classifier_kwargs: Mapping[str, Any] | None = None,
    preprocessing: str = "standard",
) -> Sweep:
    """Probe every layer on one split, choose the best on validation rows, and report on test rows.

    ``rows`` is ``{layer: [prompts, hidden]}``, prompts in one order for all layers and for
    ``labels``, ``groups`` and ``texts``. ``groups`` keeps related prompts in one part (see
    ``grouped_split``); for unrelated ones pass ``range(n)``. Of layers that are equally good on
    validation the lowest is chosen. Layers run side by side on all cores.

    Raises:
        InvalidRows: rows, labels, groups or texts that do not fit each other, or cannot be split.
        InvalidInput: no layer, or an unknown classifier, preprocessing or parameter.
    """
    fresh = partial(make_classifier, classifier, random_state, classifier_kwargs, preprocessing)
    fresh()  # A wrong name or parameter is refused before any row is read.
    numbers = _layer_numbers(rows)
    answers = read_labels(labels, len(_table(rows, numbers[0])))
    _check_lengths(len(answers), groups, texts)
    task = _Task(answers, grouped_split(groups, answers, random_state=random_state), fresh)
    tick = _counter(progress, len(numbers) + _SHUFFLES)
    # One layer at a time is read, here: memory holds the layers in work, not all of them.
    layers = _choose(run_all((partial(task.layer_score, k, _table(rows, k, len(answers))) for k in numbers), tick))
    best_layer = next(score.layer for score in layers if score.chosen)
    return Sweep(
        layers=layers,
        best_layer=best_layer,
        split=task.split,
        classifier=name_of(classifier),
        random_state=random_state,
        control=task.control(_table(rows, best_layer), random_state, tick),
        majority=majority(answers[task.fitting], answers[task.split.test]),
        bag_of_words=None if texts is None else task.text_baseline(bag_of_words, texts),
        text_length=None if texts is None else task.text_baseline(text_length, texts),
    )


@dataclass(frozen=True, eq=False)
class _Task:
    """What all layers share: ``labels`` [prompts], their split, and how to make an unfitted classifier."""

    labels: Labels
    split: Split
    fresh: Callable[[], Estimator]

    @property
    def fitting(self) -> NDArray[np.int64]:
        return np.concatenate([self.split.train, self.split.validation])

    def layer_score(self, layer: int, rows: Rows) -> LayerScore:
        tried, validation = self._fit_and_score(rows, self.split.train, self.split.validation)
        final, test = self._fit_and_score(rows, self.fitting, self.split.test)
        # Both fits count: the first one chose, the second one reports.
        flags = (convergence(tried)[0], convergence(final)[0])
        return LayerScore(layer, validation, test, None if None in flags else all(flags))

    def control(self, rows: Rows, random_state: int, done: Callable[[], None]) -> Control:
        train, test = self.fitting, self.split.test
        return shuffled_labels(
            self.fresh(), rows[train], self.labels[train], rows[test], self.labels[test], _SHUFFLES, random_state, done
        )

    def text_baseline(self, baseline: Callable[..., Scores], texts: Sequence[str]) -> Scores:
        train, test = self.fitting, self.split.test
        return baseline([texts[i] for i in train], self.labels[train], [texts[i] for i in test], self.labels[test])

    def _fit_and_score(
        self, rows: Rows, train: NDArray[np.int64], scored: NDArray[np.int64]
    ) -> tuple[Estimator, Scores]:
        fitted = fit_classifier(self.fresh(), rows[train], self.labels[train])
        return fitted, score_classifier(fitted, rows[scored], self.labels[scored])


def _choose(scores: Sequence[LayerScore]) -> tuple[LayerScore, ...]:
    best = min(scores, key=lambda score: (-score.validation.accuracy, score.layer))
    return tuple(replace(score, chosen=score is best) for score in scores)


def _layer_numbers(rows: Mapping[int, Any]) -> list[int]:
    if not rows:
        raise InvalidInput("a sweep needs the rows of at least one layer, {layer: [prompts, hidden]}; got none.")
    return sorted(rows)


def _table(rows: Mapping[int, Any], layer: int, n_prompts: int | None = None) -> Rows:
    try:
        table = read_rows(rows[layer], layer=layer)
    except InvalidRows as error:
        raise InvalidRows(f"layer {layer}: {error}") from error
    if n_prompts is not None and len(table) != n_prompts:
        raise InvalidRows(f"layer {layer} holds {len(table)} rows, and there are {n_prompts} prompts; one row each.")
    return table


def _check_lengths(n_prompts: int, groups: Sequence[Any] | NDArray[Any], texts: Sequence[str] | None) -> None:
    for name, given in (("groups", groups), ("texts", texts)):
        if given is not None and len(given) != n_prompts:
            raise InvalidRows(f"{name}: expected one for each of the {n_prompts} prompts; got {len(given)}.")


def _counter(progress: Progress | None, total: int) -> Callable[[], None]:
    done = 0

    def tick() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    return tick
