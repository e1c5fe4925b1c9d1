"""Completions of a service's model as an engine gives them: text, rows, tokens, steering, cancelling, refusals."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import httpx2
import numpy as np
import pytest

from streamtap.completion import (
    CaptureAsk,
    CompletionRequest,
    Delta,
    Event,
    Failed,
    Finished,
    Sampling,
    SteeringVector,
)
from streamtap.engines.api import ApiEngine
from streamtap.engines.api_written import TokenNames
from streamtap.engines.base import Completes
from streamtap.engines.completing import run_request
from streamtap.engines.tokenizing import PromptTokenizer
from streamtap.errors import (
    EmptyPrompt,
    InvalidInput,
    InvalidLayers,
    InvalidPositions,
    InvalidPrompt,
    PromptTooLong,
    ServerRestarting,
    SteeringUnsupported,
    TransferFailed,
    Unsupported,
)
from streamtap.testing.characters import VOCABULARY, CharacterTokenizer
from streamtap.testing.fake_completer import FakeCompleter
from streamtap.testing.stub_service import EXTENSIONS, StubService
from streamtap.wire.errors import error_body

PROMPT = (5, 40, 41, 42)
GREEDY = Sampling(temperature=0.0)
CONTEXT = 64
Load = Callable[..., ApiEngine]


class NamedCharacters(CharacterTokenizer):
    """The fake model's tokenizer, as much of a real one as tells what each id is."""

    added_tokens_decoder: ClassVar[dict[int, Any]] = {}

    def convert_ids_to_tokens(self, token_id: int) -> str | None:
        return self.decode([token_id]) if token_id < VOCABULARY else None


@pytest.fixture
def service(tmp_path: Path) -> StubService:
    return StubService(tmp_path, engine=FakeCompleter(dtype="float32", context_tokens=CONTEXT))


@pytest.fixture
def loading() -> dict[str, Any]:
    return {"tokenizer": PromptTokenizer(NamedCharacters(), context_length=CONTEXT, vocabulary=VOCABULARY)}


def alone(service: StubService, request: CompletionRequest) -> Finished:
    """What the model itself gives."""
    model = FakeCompleter(dtype="float32", context_tokens=CONTEXT)
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    model.submit(replace(request, stream=False), events.put)
    event = events.get(timeout=20)
    assert isinstance(event, Finished)
    return event


def all_events(engine: ApiEngine, request: CompletionRequest) -> list[Event]:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    engine.submit(request, events.put)
    found = [events.get(timeout=20)]
    while isinstance(found[-1], Delta):
        found.append(events.get(timeout=20))
    return found


def test_it_is_an_engine_that_completes(load: Load) -> None:
    assert isinstance(load(), Completes)


@pytest.mark.parametrize("positions", ["all", "last", "prompt", "generated", (0, 5)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_capture_is_that_of_the_model_with_its_tokens(
    service: StubService, load: Load, positions: Any, dtype: Any
) -> None:
    request = CompletionRequest((PROMPT,), 5, sampling=GREEDY, capture=CaptureAsk((1, 3), positions, dtype))

    (finished,) = all_events(load(), request)

    (right,) = alone(service, request).choices
    assert isinstance(finished, Finished)
    (choice,) = finished.choices
    assert (choice.text, choice.prompt_ids, choice.token_ids) == (right.text, PROMPT, right.token_ids)
    assert choice.logs is None, "what was asked for to know the tokens is not the caller's"
    assert choice.rows is not None
    assert right.rows is not None
    assert choice.rows.positions.tolist() == right.rows.positions.tolist()
    np.testing.assert_array_equal(choice.rows.values, right.rows.values)


def test_complete_takes_what_the_local_engine_takes(service: StubService, load: Load) -> None:
    engine = load()

    found = engine.complete("The sky", max_tokens=3, capture=[2], positions="prompt", temperature=0.0, logprobs=2)

    (choice,) = found.choices
    assert found.model == "org/fake"
    assert found.activations is not None
    assert found.activations.provenance == engine.provenance
    assert found.activations.layers == (2,)
    assert choice.prompt_ids == tuple(engine.tokenizer.read("The sky", 0).tolist())
    assert choice.logs is not None
    assert [len(log.top) for log in choice.logs] == [2, 2, 2]
    assert found.usage.completion_tokens == 3


def test_a_text_that_comes_back_is_sent_as_it_is(service: StubService, load: Load) -> None:
    found = load().complete("The sky", max_tokens=2, echo=True, temperature=0.0)

    assert service.asked[0]["prompt"] == "The sky"
    assert found.text.startswith("The sky")


def test_steering_reaches_the_model(service: StubService, load: Load) -> None:
    vector = SteeringVector((1,), np.arange(8, dtype=np.float32)[None], 2.0)
    request = CompletionRequest((PROMPT,), 1, sampling=GREEDY, capture=CaptureAsk((1,), "all", "float32"))

    steered = run_request(load(), replace(request, steering=(vector,)))

    (right,) = alone(service, replace(request, steering=(vector,))).choices
    (plain,) = alone(service, request).choices
    assert steered.activations is not None
    assert right.rows is not None
    assert plain.rows is not None
    np.testing.assert_array_equal(steered.activations.acts[1], right.rows.values[0])
    assert not np.array_equal(right.rows.values, plain.rows.values)


@pytest.mark.parametrize("streams", [True, False])
def test_text_is_streamed_whoever_listens(service: StubService, load: Load, streams: bool) -> None:
    """So that to leave it stops the work."""
    request = CompletionRequest((PROMPT, PROMPT[:2]), 4, n=2, sampling=GREEDY, logprobs=1, stream=streams)

    *deltas, finished = all_events(load(), request)

    right = alone(service, request)
    assert service.asked[0]["stream"] is True
    assert bool(deltas) is streams
    assert isinstance(finished, Finished)
    assert finished.usage == right.usage
    assert [choice.text for choice in finished.choices] == [choice.text for choice in right.choices]
    assert [choice.finish_reason for choice in finished.choices] == ["length"] * 4
    assert [choice.prompt_ids for choice in finished.choices] == [PROMPT, PROMPT, PROMPT[:2], PROMPT[:2]]
    assert [len(choice.logs or ()) for choice in finished.choices] == [4] * 4
    if streams:
        said = "".join(delta.text for delta in deltas if isinstance(delta, Delta) and delta.index == 2)
        assert said == right.choices[2].text


def test_log_probabilities_of_a_prompt_come_whole_and_are_told_as_a_stream(service: StubService, load: Load) -> None:
    request = CompletionRequest((PROMPT,), 2, sampling=GREEDY, prompt_logprobs=0, stream=True)

    delta, finished = all_events(load(), request)

    assert isinstance(delta, Delta)
    assert isinstance(finished, Finished)
    assert delta.text == finished.choices[0].text
    logs = finished.choices[0].prompt_logs
    assert logs is not None
    assert [logs.at(place).token_id for place in range(1, 4)] == list(PROMPT[1:])


def test_what_breaks_is_asked_again_but_for_a_stream(service: StubService, load: Load) -> None:
    engine, broken = load(), [1]

    def before(_request: httpx2.Request) -> None:
        if broken:
            broken.pop()
            raise httpx2.ReadError("reset")

    service.before = before  # type: ignore[assignment]
    whole = CompletionRequest((PROMPT,), 2, sampling=GREEDY, capture=CaptureAsk((0,)))
    for request in (whole, replace(whole, capture=None)):
        broken[:] = [1]
        assert isinstance(all_events(engine, request)[-1], Finished)
    broken[:] = [1]
    (failed,) = all_events(engine, replace(whole, capture=None, stream=True))
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, TransferFailed)


def test_what_the_service_refuses_is_told_by_its_class(service: StubService, load: Load) -> None:
    engine, refusal = load(), error_body(SteeringUnsupported("not this one."), "r")
    service.before = lambda _request: httpx2.Response(
        400, content=refusal, headers={"content-type": "application/json"}
    )

    (failed,) = all_events(engine, CompletionRequest((PROMPT,), 4, capture=CaptureAsk((0,))))

    assert isinstance(failed, Failed)
    assert isinstance(failed.error, SteeringUnsupported)
    with pytest.raises(SteeringUnsupported, match="not this one"):
        engine.complete(PROMPT, max_tokens=2)


def test_a_cancelled_request_is_silent(service: StubService, load: Load) -> None:
    engine, held, events = load(), threading.Event(), []

    def before(_request: httpx2.Request) -> None:
        held.wait(10)

    service.before = before  # type: ignore[assignment]
    cancels = [
        engine.submit(CompletionRequest((PROMPT,), 2, stream=stream, capture=capture), events.append)
        for stream, capture in ((True, None), (False, None), (False, CaptureAsk((0,))))
    ]
    for cancel in cancels:
        cancel()
        cancel()
    held.set()
    service.before = None

    assert engine.complete(PROMPT, max_tokens=1).usage.completion_tokens == 1
    assert events == []


def test_whoever_listens_may_cancel(service: StubService, load: Load) -> None:
    events: list[Event] = []
    cancels: list[Any] = []
    ready, emitted = threading.Event(), threading.Event()

    def emit(event: Event) -> None:
        ready.wait(10)
        events.append(event)
        cancels[0]()
        emitted.set()

    engine = load()
    cancels.append(engine.submit(CompletionRequest((PROMPT,), 30, sampling=GREEDY, stream=True), emit))
    ready.set()
    assert emitted.wait(10)
    assert engine.complete(PROMPT, max_tokens=1).usage.completion_tokens == 1

    assert len(events) == 1


def test_whoever_stops_reading_a_stream_stops_it(load: Load) -> None:
    engine = load()

    deltas = engine.stream(PROMPT, max_tokens=30, temperature=0.0)
    first = next(deltas)
    deltas.close()  # type: ignore[attr-defined]

    assert first.text
    end = time.monotonic() + 10
    while engine._flights._open and time.monotonic() < end:
        time.sleep(0.01)
    assert engine._flights._open == set()


def test_a_closed_engine_fails_what_is_under_way(service: StubService, load: Load) -> None:
    engine, held, events = load(), threading.Event(), queue.SimpleQueue[Event]()
    service.before = lambda _request: held.wait(10) and None  # type: ignore[assignment, func-returns-value]
    engine.submit(CompletionRequest((PROMPT,), 2), events.put)

    engine.close()
    event = events.get(timeout=5)
    held.set()

    assert isinstance(event, Failed)
    assert isinstance(event.error, ServerRestarting)


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        ({"prompts": ()}, InvalidInput),
        ({"prompts": ((),)}, EmptyPrompt),
        ({"prompts": ((VOCABULARY,),)}, InvalidPrompt),
        ({"prompts": (PROMPT, (5,) * CONTEXT)}, PromptTooLong),
        ({"max_tokens": CONTEXT}, PromptTooLong),
        ({"capture": CaptureAsk((4,))}, InvalidInput),
        ({"capture": CaptureAsk((0,), (9,))}, InvalidPositions),
        ({"capture": CaptureAsk((0,)), "stream": True}, InvalidInput),
        ({"steering": (SteeringVector((1,), np.ones((1, 9), np.float32)),)}, InvalidInput),
        ({"steering": (SteeringVector((4,), np.ones((1, 8), np.float32)),)}, InvalidInput),
    ],
)
def test_what_cannot_be_is_refused_with_nothing_sent(
    service: StubService, load: Load, changed: dict[str, Any], kind: Any
) -> None:
    events: list[Event] = []
    request = replace(CompletionRequest((PROMPT,), 1, sampling=GREEDY), **changed)

    with pytest.raises(kind) as caught:
        load().submit(request, events.append)

    assert events == service.asked == []
    assert getattr(caught.value, "index", 0) == (1 if len(request.prompts) == 2 else 0)


@pytest.mark.parametrize("capture", [CaptureAsk((0,), "last"), CaptureAsk((0,), "all", "float32")])
def test_a_service_is_not_asked_for_what_it_does_not_know(
    service: StubService, load: Load, capture: CaptureAsk
) -> None:
    service.can = dict.fromkeys(EXTENSIONS)

    with pytest.raises(Unsupported, match="this service sends"):
        load().submit(CompletionRequest((PROMPT,), 1, capture=capture), print)
    with pytest.raises(InvalidLayers):
        load().complete(PROMPT, capture=[7])


def test_tokens_are_told_where_each_is_certain() -> None:
    names = TokenNames(PromptTokenizer(NamedCharacters(), vocabulary=VOCABULARY))
    letters = NamedCharacters()("abc", add_special_tokens=False)["input_ids"]

    assert names.ids(["a", "b", "c"], {}) == tuple(letters)
    assert names.ids(["a", "no such", "c"], {}) == ()
    assert names.ids(["a", "no such", "c"], {1: 50}) == (letters[0], 50, letters[2])
    assert names.ids([], {}) == ()
    assert TokenNames(PromptTokenizer(None)).ids(["a"], {}) == ()


def test_a_text_that_several_tokens_have_names_none_of_them() -> None:
    class Doubled(NamedCharacters):
        def decode(self, token_ids: Any, **options: Any) -> str:
            return super().decode([50 if token == 51 else token for token in token_ids], **options)

    names = TokenNames(PromptTokenizer(Doubled(), vocabulary=VOCABULARY))
    text = Doubled().decode([51])

    assert names.ids([text], {}) == ()
    assert names.ids([text], {0: 51}) == (51,)
