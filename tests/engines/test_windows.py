"""A stream of prompts in windows: bounded, lazy, equal sequences found, rows put back under their prompts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from streamtap.activations import Provenance
from streamtap.capture.runs import HostRows
from streamtap.engines import windows as module
from streamtap.engines.tokenizing import PromptTokenizer
from streamtap.engines.windows import HeldBytes, Window, perplexity_of, windows_of
from streamtap.errors import EmptyPrompt
from streamtap.spec import CaptureSpec, Prompt

MADE_BY = Provenance("tiny", "abc", "tok", "float32")


def windows(
    prompts: Iterable[Any], held: HeldBytes | None = None, *, cut: bool = True, **spec: Any
) -> Iterator[Window]:
    return windows_of(prompts, PromptTokenizer(None, vocabulary=97), CaptureSpec(**spec), held, cut=cut)


def runs_of(window: Window) -> list[list[int]]:
    return [run.token_ids.tolist() for run in window.runs]


def test_equal_sequences_are_one_run_with_several_places() -> None:
    (window,) = windows([[5, 6], [7], [5, 6], [5], [5, 6]])

    assert runs_of(window) == [[5, 6], [7], [5]]
    assert window.places == [[0, 2, 4], [1], [3]]
    assert [run.name for run in window.runs] == [0, 1, 3]


def test_equal_tokens_with_other_positions_are_two_runs() -> None:
    prompts = [Prompt(token_ids=[5, 6], positions=[0, 1]), Prompt(token_ids=[5, 6], positions=[1])]

    (window,) = windows(prompts)

    assert window.places == [[0], [1]]
    assert [run.chosen.tolist() for run in window.runs] == [[0, 1], [1]]


def test_tokens_behind_the_last_chosen_position_are_left_out() -> None:
    (window,) = windows([[5, 6, 7], [5, 6, 8], [5]], positions=":2")

    assert runs_of(window) == [[5, 6], [5]]
    assert window.places == [[0, 1], [2]]


@pytest.mark.parametrize("spec", [{"exact": True}, {}], ids=["exact", "head"])
def test_whole_prompts_run_where_their_end_matters(spec: dict[str, Any]) -> None:
    (window,) = windows([[5, 6, 7], [5, 6, 8]], cut=bool(spec), positions=":2", **spec)

    assert runs_of(window) == [[5, 6, 7], [5, 6, 8]]


def test_prompts_are_read_one_window_ahead_and_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WINDOW_PROMPTS", 3)
    taken: list[int] = []

    def endless() -> Iterator[list[int]]:
        while True:
            taken.append(len(taken))
            yield [5, len(taken) % 90]

    stream = windows(endless())
    assert taken == []
    first = next(stream)
    assert len(taken) == 3
    second = next(stream)
    assert len(taken) == 6

    assert [first.places, second.places] == [[[0], [1], [2]], [[3], [4], [5]]]


def test_a_fault_in_a_later_window_is_named_by_its_place_in_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WINDOW_PROMPTS", 2)
    stream = windows(iter([[5], [6], [7], []]))

    next(stream)
    with pytest.raises(EmptyPrompt, match="prompt 3 is empty") as caught:
        next(stream)
    assert caught.value.index == 3


def cuts(prompts: list[list[int]], held: HeldBytes | None, **spec: Any) -> list[int]:
    return [sum(map(len, window.places)) for window in windows(prompts, held, **spec)]


def test_rows_that_wait_for_their_order_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ORDERED_BYTES", 1000)
    prompts = [[5] * n for n in (3, 3, 4, 11, 1, 9, 1)]

    assert cuts(prompts, HeldBytes(100, 0)) == [3, 1, 2, 1]
    assert cuts(prompts, HeldBytes(100, 0), pooling="last_token") == [7]
    assert cuts(prompts, HeldBytes(100, 0), pooling="mean") == [7]
    assert cuts(prompts, HeldBytes(300, 0), pooling="max") == [3, 3, 1]
    assert cuts(prompts, HeldBytes(300, 0), positions="last") == [3, 3, 1]
    assert cuts(prompts, HeldBytes(10**9, 0)) == [1] * 7
    assert cuts(prompts, None) == [7]


def test_logits_that_wait_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ORDERED_BYTES", 1000)
    prompts = [[5] * n for n in (3, 3, 4, 11, 1, 9, 1)]

    assert cuts(prompts, HeldBytes(1, 100), positions="last", logits="all") == [2, 1, 1, 1, 1, 1]
    assert cuts(prompts, HeldBytes(0, 300), logits="last") == [3, 3, 1]


def test_equal_prompts_of_one_window_only_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WINDOW_PROMPTS", 2)

    assert [window.places for window in windows([[5], [5], [5]])] == [[[0, 1]], [[2]]]


def batch(counts: list[int], positions: list[int], n_layers: int = 1, **head: Any) -> HostRows:
    """Rows that hold 0, 1, 2, … at the first layer, 100 more at each further one."""
    rows = np.arange(sum(counts), dtype=np.float32)[None, :, None] + 100 * np.arange(n_layers)[:, None, None]
    parts = {"nll": None, "logits": None, "logit_ids": None} | head
    return HostRows(rows, np.array(counts), np.array(positions, np.int32), **parts)


def test_rows_are_given_out_under_every_place_of_their_run() -> None:
    (window,) = windows([[5, 6], [7], [5, 6]])
    nll, logits = np.array([0.5], np.float32), np.array([[1.0, 2.0]], np.float32)
    rows = batch(
        [1, 2], [0, 0, 1], nll=[nll[:0], nll], logits=[logits, logits + 1], logit_ids=[np.array([[3, 4]], np.int32)] * 2
    )

    spec = CaptureSpec(token_nll=True, perplexity=True, logits="last")
    acts = window.activations((1, 0), rows, (4,), spec, MADE_BY)

    assert acts.index.tolist() == [1, 0, 2]
    assert acts.offsets.tolist() == [0, 1, 3, 5]
    assert acts.acts[4][:, 0].tolist() == [0, 1, 2, 1, 2]
    assert acts.token_ids.tolist() == [7, 5, 6, 5, 6]
    assert acts.positions.tolist() == [0, 0, 1, 0, 1]
    assert [each.tolist() for each in acts.token_nll or ()] == [[], [0.5], [0.5]]
    assert acts.perplexity is not None
    assert np.isnan(acts.perplexity[0]).all()
    assert acts.perplexity[1].tolist() == acts.perplexity[2].tolist()
    assert acts.logits is not None
    assert acts.logits.tolist() == [[1, 2], [2, 3], [2, 3]]
    assert acts.logit_offsets is not None
    assert acts.logit_offsets.tolist() == [0, 1, 2, 3]


def test_rows_are_given_out_under_the_layers_that_were_asked_for() -> None:
    (window,) = windows([[5, 6], [7]])

    acts = window.activations((0, 1), batch([2, 1], [0, 1, 0], n_layers=2), (3, 8), CaptureSpec(), MADE_BY)

    assert acts.layers == (3, 8)
    assert acts.acts[3][:, 0].tolist() == [0, 1, 2]
    assert acts.acts[8][:, 0].tolist() == [100, 101, 102]


def test_without_rows_there_are_no_layers() -> None:
    (window,) = windows([[5, 6]])
    rows = HostRows(None, np.array([2]), np.array([0, 1], np.int32), [np.array([0.5], np.float32)], None, None)

    acts = window.activations((0,), rows, (), CaptureSpec(layers=(), token_nll=True), MADE_BY)

    assert acts.layers == ()
    assert acts.offsets.tolist() == [0, 2]
    assert acts.token_ids.tolist() == [5, 6]


def test_a_row_over_several_tokens_stands_on_none() -> None:
    (window,) = windows([[5, 6], [7, 8, 9]], pooling="mean")

    acts = window.activations((1, 0), batch([1, 1], [-1, -1]), (0,), CaptureSpec(pooling="mean"), MADE_BY)

    assert acts.token_ids.tolist() == acts.positions.tolist() == [-1, -1]
    assert acts.pooling == "mean"
    assert [acts.perplexity, acts.token_nll, acts.logits, acts.logit_offsets] == [None] * 4


def test_perplexity_is_the_exponential_of_the_mean_cost() -> None:
    mean, low, high = perplexity_of(np.log(np.array([2.0, 8.0, 4.0], np.float32)))

    assert (mean, low, high) == pytest.approx((4.0, 2.0, 8.0), rel=1e-6)
    assert all(np.isnan(perplexity_of(np.zeros(0, np.float32))))
