from __future__ import annotations

import queue
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from streamtap.completion import (
    CaptureAsk,
    CompletionRequest,
    Event,
    Finished,
    Rows,
    Sampling,
    SteeringVector,
)
from streamtap.engines.worker.whole import check_whole, expected_positions
from streamtap.errors import CaptureMissed, SteeringNotFinite
from streamtap.testing.fake_completer import FakeCompleter, Fault

ASK = CaptureAsk(layers=(1, 3))
REQUEST = CompletionRequest(prompts=("ab", "cde"), max_tokens=4, sampling=Sampling(temperature=0), capture=ASK)


def finished_of(request: CompletionRequest, fault: Fault | None = None) -> Finished:
    events: queue.Queue[Event] = queue.Queue()
    FakeCompleter(fault=fault).submit(request, events.put)
    event = events.get(timeout=10)
    assert isinstance(event, Finished)
    return event


def with_rows(finished: Finished, **changed: Any) -> Finished:
    first, *others = finished.choices
    assert first.rows is not None
    return replace(finished, choices=(replace(first, rows=replace(first.rows, **changed)), *others))


def rows_of(finished: Finished) -> Rows:
    assert finished.choices[0].rows is not None
    return finished.choices[0].rows


@pytest.mark.parametrize("positions", ["all", "last", "prompt", "generated", (0, 4, 99)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_whole_capture_passes(positions: Any, dtype: Any) -> None:
    request = replace(REQUEST, capture=replace(ASK, positions=positions, dtype=dtype))

    check_whole(request, finished_of(request), hidden=8)


def test_a_request_without_capture_has_nothing_to_check() -> None:
    request = replace(REQUEST, capture=None)

    check_whole(request, finished_of(request), hidden=8)


@pytest.mark.parametrize(
    ("fault", "layer", "said"),
    [
        ("missing_layer", 3, "choice 0 lacks layer 3"),
        ("short", 1, r"choice 0 has rows of shape \[5, 8\] from layer 1 on; expected \[6, 8\]"),
        ("nan", 3, "layer 3 of choice 0 holds a value that is not finite"),
    ],
)
def test_a_capture_that_is_not_whole_names_the_layer(fault: Fault, layer: int, said: str) -> None:
    with pytest.raises(CaptureMissed, match=said) as caught:
        check_whole(REQUEST, finished_of(REQUEST, fault), hidden=8)

    assert caught.value.layer == layer


def test_values_that_steering_drove_out_of_range_are_the_callers() -> None:
    vector = SteeringVector((1,), np.ones((1, 8), np.float32), scale=1e39)
    request = replace(REQUEST, steering=(vector,))

    with pytest.raises(SteeringNotFinite, match="layer 1 of choice 0"):
        check_whole(request, finished_of(request), hidden=8)


def test_every_choice_is_looked_at() -> None:
    finished = finished_of(REQUEST)
    first, second = finished.choices

    with pytest.raises(CaptureMissed, match="1 of 2 choices"):
        check_whole(REQUEST, replace(finished, choices=(first,)), hidden=8)
    with pytest.raises(CaptureMissed, match="choice 1 has no rows"):
        check_whole(REQUEST, replace(finished, choices=(first, replace(second, rows=None))), hidden=8)


def test_rows_must_be_those_that_were_asked_for() -> None:
    finished = finished_of(REQUEST)
    rows = rows_of(finished)
    wrong: dict[str, Any] = {
        "lacks layer 3": {"layers": (1, 2)},
        "expected bfloat16": {"values": rows.values.astype(np.float32)},
        "of other positions": {"positions": rows.positions[::-1]},
        "or tokens": {"token_ids": rows.token_ids + 1},
        "expected \\[6, 8\\]": {"values": rows.values[..., :4]},
    }

    for said, changed in wrong.items():
        with pytest.raises(CaptureMissed, match=said):
            check_whole(REQUEST, with_rows(finished, **changed), hidden=8)


def test_the_last_token_has_no_row() -> None:
    assert expected_positions("all", 6, 5).tolist() == list(range(10))
    assert expected_positions("all", 6, 1).tolist() == expected_positions("all", 6, 0).tolist() == list(range(6))
    assert expected_positions("generated", 6, 5).tolist() == [6, 7, 8, 9]
    assert expected_positions("last", 6, 5).tolist() == [9]
    assert expected_positions((2, 9, 10), 6, 5).tolist() == [2, 9]
