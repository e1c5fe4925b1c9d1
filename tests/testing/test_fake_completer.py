from __future__ import annotations

import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from streamtap.completion import (
    CaptureAsk,
    Choice,
    CompletionRequest,
    Delta,
    Event,
    Failed,
    Finished,
    Sampling,
    SteeringVector,
)
from streamtap.engines.base import Completes
from streamtap.errors import EmptyPrompt, InvalidInput, InvalidLayers, InvalidPrompt, PromptTooLong, ServerRestarting
from streamtap.testing.fake_completer import FakeCompleter
from streamtap.testing.fake_engine import FakeEngine
from streamtap.testing.fake_text import text_of, written

GREEDY = Sampling(temperature=0)
REQUEST = CompletionRequest(prompts=("hello",), max_tokens=6, sampling=GREEDY)
HELLO = [0, 76, 73, 80, 80, 83]


def events_of(request: CompletionRequest, engine: FakeCompleter | None = None) -> list[Event]:
    events: queue.Queue[Event] = queue.Queue()
    (engine or FakeCompleter()).submit(request, events.put)
    found = [events.get(timeout=10)]
    while isinstance(found[-1], Delta):
        found.append(events.get(timeout=10))
    return found


def choices_of(request: CompletionRequest, engine: FakeCompleter | None = None) -> Sequence[Choice]:
    last = events_of(request, engine)[-1]
    assert isinstance(last, Finished)
    return last.choices


def values_of(request: CompletionRequest, engine: FakeCompleter | None = None) -> Any:
    rows = choices_of(request, engine)[0].rows
    assert rows is not None
    return rows.values


def test_it_completes() -> None:
    assert isinstance(FakeCompleter(), Completes)


def test_it_needs_no_torch() -> None:
    code = "import sys, streamtap.testing.fake_worker; print({'torch', 'transformers'} & set(sys.modules))"

    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_text_is_a_function_of_the_prompt() -> None:
    (choice,) = choices_of(REQUEST)

    assert list(choice.token_ids) == written(HELLO, 6)
    assert choice.text == text_of(written(HELLO, 6))
    assert len(choice.text) == 6
    assert choice.text.isalpha()
    assert (choice.finish_reason, choice.stop_reason) == ("length", None)


def test_whatever_is_mixed_up_shows() -> None:
    request = replace(REQUEST, prompts=("hello", "hellp", (5, 6)), n=2, max_tokens=24, sampling=Sampling(seed=1))
    last = events_of(request)[-1]
    assert isinstance(last, Finished)

    assert [choice.index for choice in last.choices] == list(range(6))
    assert [choice.prompt_ids[-1] for choice in last.choices] == [83, 83, 84, 84, 6, 6]
    for left, right in combinations(last.choices, 2):
        assert left.text != right.text
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (14, 144)


def test_a_seed_repeats_and_another_does_not() -> None:
    texts = [choices_of(replace(REQUEST, max_tokens=24, sampling=Sampling(seed=seed)))[0].text for seed in (1, 1, 2)]

    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("n_letters", [1, 2, 3])
def test_a_stop_string_ends_the_text_and_never_shows(n_letters: int) -> None:
    whole = text_of(written(HELLO, 20))
    stop = whole[5 : 5 + n_letters]
    where = whole.index(stop)
    events = events_of(replace(REQUEST, max_tokens=20, stop=("?", stop), stream=True))
    last = events[-1]
    assert isinstance(last, Finished)
    (choice,) = last.choices

    assert choice.text == whole[:where]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    assert len(choice.token_ids) == where + n_letters
    assert "".join(event.text for event in events if isinstance(event, Delta)) == choice.text


def test_a_stream_has_a_delta_for_each_token() -> None:
    *deltas, last = events_of(replace(REQUEST, stream=True, n=2, echo=True, logprobs=1))
    assert isinstance(last, Finished)

    assert all(isinstance(delta, Delta) for delta in deltas)
    for choice in last.choices:
        own = [delta for delta in deltas if isinstance(delta, Delta) and delta.index == choice.index]
        assert len(own) == 6
        assert "".join(delta.text for delta in own) == choice.text
        assert tuple(log for delta in own for log in delta.logs) == choice.logs
        assert [delta.finish_reason for delta in own] == [None] * 5 + ["length"]


def test_echo_and_logprobs() -> None:
    (choice,) = choices_of(replace(REQUEST, echo=True, logprobs=3, prompt_logprobs=-1))
    assert choice.logs is not None
    assert choice.prompt_logs is not None

    assert choice.text.startswith("hello")
    assert [log.text for log in choice.logs] == ["", *choice.text]
    assert [log.offset for log in choice.logs[1:]] == list(range(len(choice.text)))
    assert [log.logprob is None for log in choice.logs] == [True] + [False] * 11
    assert all(len(log.top) == 3 for log in choice.logs[1:])
    assert all(log.rank == 1 for log in choice.logs[6:])
    assert len(choice.prompt_logs) == 6
    entry = choice.prompt_logs.at(2)
    assert (entry.token_id, entry.text, len(entry.top)) == (73, "e", 97)
    assert np.isclose(sum(np.exp(logprob) for _, _, logprob in entry.top), 1)
    assert entry.rank is not None
    assert (73, "e", entry.logprob) == entry.top[entry.rank - 1]


def test_no_token_may_be_asked_for() -> None:
    (choice,) = choices_of(replace(REQUEST, max_tokens=0, echo=True, capture=CaptureAsk((0,))))

    assert (choice.text, choice.token_ids, choice.finish_reason) == ("hello", (), "length")
    assert choice.rows is not None
    assert choice.rows.values.shape == (1, 6, 8)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_are_those_of_the_fake_engine(dtype: Any) -> None:
    (choice,) = choices_of(replace(REQUEST, capture=CaptureAsk((1, 3), dtype=dtype)), FakeCompleter(dtype=dtype))
    rows = choice.rows
    assert rows is not None

    fed = HELLO + list(choice.token_ids[:-1])
    assert rows.values.dtype.name == dtype
    for place, layer in enumerate((1, 3)):
        np.testing.assert_array_equal(rows.values[place], FakeEngine(dtype=dtype).rows(fed, layer))
    assert rows.positions.tolist() == list(range(11))
    assert rows.token_ids.tolist() == fed


@pytest.mark.parametrize(
    ("asked", "places"),
    [("last", [10]), ("prompt", [0, 1, 2, 3, 4, 5]), ("generated", [6, 7, 8, 9, 10]), ((9, 2, 50), [2, 9])],
)
def test_positions_are_chosen(asked: Any, places: list[int]) -> None:
    whole = values_of(replace(REQUEST, capture=CaptureAsk((2,))))
    some = choices_of(replace(REQUEST, capture=CaptureAsk((2,), positions=asked)))[0].rows
    assert some is not None

    assert some.positions.tolist() == places
    np.testing.assert_array_equal(some.values, whole[:, places])


def steered(vector: SteeringVector) -> Any:
    request = replace(REQUEST, capture=CaptureAsk((1, 2), dtype="float32"))
    engine = FakeCompleter(dtype="float32")
    return values_of(replace(request, steering=(vector,)), engine) - values_of(request, engine)


def test_steering_adds_at_its_layer_and_positions() -> None:
    direction = np.arange(8, dtype=np.float32)[None] + 1
    everywhere = steered(SteeringVector((1,), direction, scale=2))
    spans = steered(SteeringVector((1,), direction, scale=2, spans=((1, 3), (7, 8))))

    np.testing.assert_allclose(everywhere[0], np.broadcast_to(2 * direction, (11, 8)), rtol=1e-5)
    assert not everywhere[1].any()
    assert np.flatnonzero(spans[0].any(axis=1)).tolist() == [1, 2, 7]


def test_steering_has_a_vector_for_each_position() -> None:
    directions = np.arange(1, 25, dtype=np.float32).reshape(1, 3, 8)
    first = steered(SteeringVector((2,), directions))
    chosen = steered(SteeringVector((2,), directions, positions=(0, 8, 40)))

    np.testing.assert_allclose(first[1, :3], directions[0], rtol=1e-5)
    assert not first[1, 3:].any()
    assert np.flatnonzero(chosen[1].any(axis=1)).tolist() == [0, 8]
    np.testing.assert_allclose(chosen[1, 8], directions[0, 1], rtol=1e-5)


def test_norm_match_and_scale_zero() -> None:
    direction = np.ones((1, 8), np.float32)
    plain = values_of(replace(REQUEST, capture=CaptureAsk((1,), dtype="float32")), FakeCompleter(dtype="float32"))
    change = steered(SteeringVector((1,), direction, scale=-0.5, norm_match=True))

    np.testing.assert_allclose(np.linalg.norm(change[0], axis=1), 0.5 * np.linalg.norm(plain[0], axis=1), rtol=1e-4)
    assert not steered(SteeringVector((1,), direction, scale=0)).any()


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"prompts": ((),)}, EmptyPrompt),
        ({"prompts": ((97,),)}, InvalidPrompt),
        ({"max_tokens": 2043}, PromptTooLong),
        ({"capture": CaptureAsk((4,))}, InvalidLayers),
        ({"steering": (SteeringVector((0,), np.ones((1, 7), np.float32)),)}, InvalidInput),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_runs(changed: dict[str, Any], error: type[Exception]) -> None:
    engine = FakeCompleter()
    with pytest.raises(error):
        engine.submit(replace(REQUEST, **changed), lambda _event: None)

    assert (engine.requests, engine.running) == ([], 0)


def test_nothing_comes_after_a_cancel() -> None:
    engine = FakeCompleter(token_seconds=0.01)
    events: list[Event] = []
    began = threading.Event()

    def emit(event: Event) -> None:
        events.append(event)
        began.set()

    cancel = engine.submit(replace(REQUEST, max_tokens=2000, stream=True), emit)
    assert began.wait(10)
    cancel()
    held = len(events)
    time.sleep(0.05)

    assert len(events) == held
    assert (engine.running, engine.cancelled) == (0, 1)


def test_closing_fails_what_runs_and_takes_nothing_more() -> None:
    engine, events = FakeCompleter(token_seconds=60), queue.Queue[Event]()
    engine.submit(REQUEST, events.put)
    engine.close()
    event = events.get(timeout=10)

    assert isinstance(event, Failed)
    assert isinstance(event.error, ServerRestarting)
    with pytest.raises(ServerRestarting):
        engine.submit(REQUEST, events.put)


def test_requests_take_their_time_side_by_side() -> None:
    engine = FakeCompleter(token_seconds=0.05)
    began, events = time.monotonic(), queue.Queue[Event]()
    for _ in range(20):
        engine.submit(REQUEST, events.put)
    for _ in range(20):
        assert isinstance(events.get(timeout=10), Finished)

    assert 0.3 <= time.monotonic() - began < 5, "one after the other would take six"
    assert engine.steps == 20 * 6


def test_faults_come_as_they_were_asked_for() -> None:
    request = replace(REQUEST, capture=CaptureAsk((0, 2)))
    whole = values_of(request)

    assert values_of(request, FakeCompleter(fault="missing_layer")).shape == (1, 11, 8)
    assert values_of(request, FakeCompleter(fault="short")).shape == (2, 10, 8)
    spoilt = values_of(request, FakeCompleter(fault="nan"))
    assert np.isnan(spoilt.astype(np.float32)).sum() == 1
    assert whole.dtype == spoilt.dtype == ml_dtypes.bfloat16
    (event,) = events_of(request, FakeCompleter(fault="error"))
    assert isinstance(event, Failed)


@pytest.mark.parametrize(("option", "before"), [("fault='die'", 0), ("die_after=2", 2)])
def test_a_process_can_be_made_to_die(option: str, before: int) -> None:
    code = (
        "import queue\n"
        "from streamtap.completion import CompletionRequest\n"
        "from streamtap.testing.fake_completer import FakeCompleter\n"
        f"engine, events = FakeCompleter({option}), queue.Queue()\n"
        "for number in range(4):\n"
        "    print(number, flush=True)\n"
        "    engine.submit(CompletionRequest(('a',), 3), events.put)\n"
        "    events.get()\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)

    assert ran.returncode == 70
    assert ran.stdout.split() == [str(number) for number in range(before + 1)]
