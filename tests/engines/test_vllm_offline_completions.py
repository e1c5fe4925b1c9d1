"""Completions on vLLM, over a stand-in for the library: a sequence for each sample, text as it comes, refusals."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

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
from streamtap.engines import vllm_offline
from streamtap.engines.vllm_offline import VllmEngine
from streamtap.errors import (
    CaptureMissed,
    EngineFailed,
    InvalidInput,
    InvalidPositions,
    PromptTooLong,
    ServerRestarting,
    SteeringNotFinite,
    SteeringUnsupported,
    StreamtapError,
)
from streamtap.testing.stub_vllm import DRAWN, RIVAL, StubVllm, installed, stub_described

FORMULA = StubVllm.formula
IDS = (9, 8, 7)
VECTOR = SteeringVector((1,), np.ones((1, FORMULA.hidden), np.float32), 2.0)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[StubVllm]]:
    monkeypatch.setattr(vllm_offline, "described_model", lambda *_args, **_named: stub_described())
    every: list[StubVllm] = []

    def opening(**options: Any) -> StubVllm:
        every.append(StubVllm(**options))
        return every[-1]

    with installed(opening):
        yield every


@pytest.fixture
def engine(opened: list[StubVllm]) -> Iterator[VllmEngine]:
    engine = VllmEngine.load("/a/model")
    yield engine
    engine.close()


def request(**values: Any) -> CompletionRequest:
    return CompletionRequest(**{"prompts": (IDS,), "max_tokens": 3, **values})


def test_text_tokens_and_usage(engine: VllmEngine) -> None:
    done = engine.complete([IDS, (5,)], max_tokens=3)

    assert [choice.text for choice in done.choices] == ["(((", "((("]
    assert [choice.token_ids for choice in done.choices] == [(DRAWN,) * 3] * 2
    assert [choice.prompt_ids for choice in done.choices] == [IDS, (5,)]
    assert [(choice.finish_reason, choice.stop_reason) for choice in done.choices] == [("length", None)] * 2
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (4, 6)
    assert done.model == "/a/model"


@pytest.mark.parametrize(
    ("positions", "places"),
    [("all", [0, 1, 2, 3, 4]), ("prompt", [0, 1, 2]), ("generated", [3, 4]), ("last", [4]), ((0, 3), [0, 3])],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_of_prompt_and_text(engine: VllmEngine, positions: Any, places: list[int], dtype: Any) -> None:
    done = engine.complete(IDS, max_tokens=3, capture=[0, 2], positions=positions, output_dtype=dtype)

    fed = (*IDS, DRAWN, DRAWN)
    assert done.activations is not None
    assert done.activations.positions.tolist() == places
    assert done.activations.token_ids.tolist() == [fed[place] for place in places]
    for layer, rows in done.activations.acts.items():
        expected = FORMULA.rows(fed, layer)[places]
        assert rows.dtype.name == dtype
        np.testing.assert_array_equal(rows, expected.astype(rows.dtype))


def test_every_sample_is_a_sequence_of_its_own(engine: VllmEngine, opened: list[StubVllm]) -> None:
    done = engine.complete([IDS, (5,)], max_tokens=2, n=2, seed=40, temperature=0.5, stop=["x"])

    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    assert opened[0].calls == [[list(IDS), list(IDS), [5], [5]]]
    more = [params.more for params in opened[0].asked]
    assert [each["seed"] for each in more] == [40, 41, 40, 41]
    assert all((each["temperature"], each["stop"], each["top_k"]) == (0.5, ["x"], -1) for each in more)
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (4, 8)


def test_prompts_captured_together_have_their_own_rows(engine: VllmEngine) -> None:
    done = engine.complete([IDS, (5,)], max_tokens=1, capture=[1])

    assert done.activations is not None
    for place, ids in enumerate([IDS, (5,)]):
        np.testing.assert_array_equal(done.activations.prompt(place)[1], FORMULA.rows(ids, 1))


def test_samples_that_vllm_has_no_room_for_at_once_run_one_after_another(opened: list[StubVllm]) -> None:
    """Four blocks of four tokens, beside one that is nobody's, hold two sequences of up to seven."""
    engine = VllmEngine.load("/a/model", engine_options={"num_gpu_blocks_override": 5})

    done = engine.complete([IDS, IDS, (5,)], max_tokens=4, capture=[1])
    engine.close()

    assert [len(call) for call in opened[0].calls] == [2, 1]
    assert done.activations is not None
    np.testing.assert_array_equal(done.activations.prompt(2)[1], FORMULA.rows((5, DRAWN, DRAWN, DRAWN), 1))


def test_nothing_drawn_is_a_token_thrown_away(engine: VllmEngine, opened: list[StubVllm]) -> None:
    done = engine.complete(IDS, max_tokens=0, capture=[1], echo=True, logprobs=1)

    (choice,) = done.choices
    assert (choice.token_ids, choice.finish_reason, done.usage.completion_tokens) == ((), "length", 0)
    assert choice.text == '$#"'
    assert opened[0].asked[0].max_tokens == 1
    assert done.activations is not None
    np.testing.assert_array_equal(done.activations.acts[1], FORMULA.rows(IDS, 1))
    assert [log.token_id for log in choice.logs or ()] == list(IDS)


def test_log_probabilities_of_text_and_echoed_prompt(engine: VllmEngine) -> None:
    (choice,) = engine.complete(IDS, max_tokens=2, logprobs=1, prompt_logprobs=0, echo=True).choices

    logs = choice.logs or ()
    assert [log.token_id for log in logs] == [*IDS, DRAWN, DRAWN]
    assert [log.logprob for log in logs[:3]] == [None, *(-cost for cost in FORMULA.losses(IDS).tolist())]
    assert [(log.logprob, log.rank, log.top) for log in logs[3:]] == [(-1.5, 2, ((RIVAL, "}", -0.25),))] * 2
    assert [log.offset for log in logs] == [0, 1, 2, 3, 4]
    assert choice.prompt_logs is not None
    assert [choice.prompt_logs.at(place).top for place in range(3)] == [(), (), ()]
    with pytest.raises(IndexError):
        choice.prompt_logs.at(3)


def test_a_stream_says_every_token_when_it_comes(engine: VllmEngine) -> None:
    deltas = list(engine.stream(IDS, max_tokens=3, logprobs=0, echo=True))

    assert [delta.text for delta in deltas] == ['$#"(', "(", "("]
    assert [len(delta.logs) for delta in deltas] == [4, 1, 1]
    assert [delta.finish_reason for delta in deltas] == [None, None, "length"]


def test_whoever_leaves_stops_the_work_and_its_rows_go(engine: VllmEngine, opened: list[StubVllm]) -> None:
    opened[0].before_step = lambda: time.sleep(0.005)
    deltas = engine.stream(IDS, max_tokens=40)
    assert next(deltas).text == "("
    deltas.close()  # type: ignore[attr-defined]

    assert engine.complete((5,), max_tokens=1).text == "("
    assert opened[0].steps < 40
    assert opened[0].left == set()
    assert not opened[0].llm_engine.has_unfinished_requests()


def test_nothing_is_emitted_after_a_cancel(engine: VllmEngine, opened: list[StubVllm]) -> None:
    inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
    reached, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        reached.set()
        assert go_on.wait(10)

    opened[0].before_step = wait
    running = engine.submit(request(stream=True), inbox.put)
    waiting = engine.submit(request(stream=True), inbox.put)
    assert reached.wait(10)
    running()
    waiting()
    go_on.set()
    opened[0].before_step = lambda: None

    assert engine.complete((5,), max_tokens=1).text == "("
    assert inbox.empty()
    assert [call for call in opened[0].calls if len(call[0]) > 1] == [[list(IDS)]]


def test_closing_fails_what_runs_and_what_waits(engine: VllmEngine, opened: list[StubVllm]) -> None:
    inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
    reached = threading.Event()
    opened[0].before_step = lambda: reached.set() or time.sleep(0.01)
    for _ in range(2):
        engine.submit(request(max_tokens=60), inbox.put)
    assert reached.wait(10)

    engine.close()

    errors = [event.error for event in (inbox.get(timeout=5), inbox.get(timeout=5)) if isinstance(event, Failed)]
    assert [type(error) for error in errors] == [ServerRestarting] * 2
    assert opened[0].closed == 1
    with pytest.raises(InvalidInput, match="closed"):
        engine.complete(IDS, max_tokens=1)


def test_a_closed_engine_takes_no_request_and_starts_no_thread(engine: VllmEngine) -> None:
    engine.close()

    with pytest.raises(InvalidInput, match="closed"):
        engine.submit(request(), lambda _event: None)

    assert not [thread for thread in threading.enumerate() if thread.name.startswith("streamtap-vllm")]


def test_a_request_that_vllm_refuses_takes_those_before_it_along(engine: VllmEngine, opened: list[StubVllm]) -> None:
    opened[0].refuses = ValueError("a b")

    with pytest.raises(InvalidInput, match="does not take this request") as caught:
        engine.complete([IDS, (5,)], max_tokens=2)

    assert "a b" not in str(caught.value)
    assert not opened[0].llm_engine.has_unfinished_requests()
    opened[0].refuses = None
    assert engine.complete(IDS, max_tokens=2).text == "(("


def test_a_caller_that_raises_is_no_bad_request(engine: VllmEngine) -> None:
    inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def emit(event: Event) -> None:
        inbox.put(event)
        if isinstance(event, Delta):
            raise ValueError("of the caller's")

    engine.submit(request(stream=True), emit)

    assert isinstance(inbox.get(timeout=10), Delta)
    last = inbox.get(timeout=10)
    assert isinstance(last, Failed)
    assert isinstance(last.error, EngineFailed)


@pytest.mark.parametrize(("raised", "expected"), [(RuntimeError("x"), EngineFailed), (Exception("x"), EngineFailed)])
def test_a_failure_is_its_requests_alone(
    engine: VllmEngine, opened: list[StubVllm], raised: Exception, expected: type[StreamtapError]
) -> None:
    opened[0].fails = raised
    with pytest.raises(expected):
        engine.complete(IDS, max_tokens=2)
    opened[0].fails = None

    assert engine.complete(IDS, max_tokens=2).text == "(("


@pytest.mark.parametrize("reason", ["abort", "error", None])
def test_a_sample_that_vllm_broke_off_is_no_answer(engine: VllmEngine, opened: list[StubVllm], reason: Any) -> None:
    def spoil(output: Any) -> Any:
        output.outputs[0].finish_reason = reason
        return output

    opened[0].spoil = spoil

    with pytest.raises(EngineFailed, match="broke sample 0 off"):
        engine.complete(IDS, max_tokens=2)


def test_an_end_token_is_named_as_the_reason(engine: VllmEngine, opened: list[StubVllm]) -> None:
    def spoil(output: Any) -> Any:
        output.outputs[0].finish_reason = "stop"
        return output

    opened[0].spoil = spoil

    (choice,) = engine.complete(IDS, max_tokens=2).choices
    assert (choice.finish_reason, choice.stop_reason) == ("stop", DRAWN)


@pytest.mark.parametrize(
    ("change", "steering", "expected"),
    [
        (lambda stream: stream[:, :-1], (), CaptureMissed),
        (lambda stream: stream / 0, (), CaptureMissed),
        (lambda stream: stream * 0, (), CaptureMissed),
        (lambda stream: stream / 0, (VECTOR,), SteeringNotFinite),
    ],
)
def test_rows_that_are_not_whole_are_no_answer(
    engine: VllmEngine, opened: list[StubVllm], change: Any, steering: Any, expected: type[StreamtapError]
) -> None:
    def spoil(output: Any) -> Any:
        output.activations["residual_stream"] = change(output.activations["residual_stream"])
        return output

    opened[0].spoil = spoil

    with pytest.raises(expected):
        engine.complete(request(capture=CaptureAsk((0, 1), "all", "float32"), steering=steering))


def test_vectors_are_written_as_vllm_lens_reads_them(engine: VllmEngine, opened: list[StubVllm]) -> None:
    engine.complete(request(steering=(VECTOR,)))

    (body,) = (opened[0].asked[0].extra_args or {})["apply_steering_vectors"]
    assert (body["layer_indices"], body["scale"], body["norm_match"]) == ([1], 2.0, False)
    assert body["activations"]["shape"] == [1, FORMULA.hidden]


def test_spans_are_a_vector_for_each_position_that_a_prompt_has(engine: VllmEngine, opened: list[StubVllm]) -> None:
    span = SteeringVector((1,), VECTOR.vectors, spans=((1, 9),))

    engine.complete(request(prompts=(IDS, (5,)), max_tokens=1, steering=(span,)))

    (body,) = (opened[0].asked[0].extra_args or {})["apply_steering_vectors"]
    assert body["position_indices"] == [1, 2]
    assert body["activations"]["shape"] == [1, 2, FORMULA.hidden]
    assert opened[0].asked[1].extra_args is None


POSITIONED = SteeringVector((1,), np.ones((1, 1, FORMULA.hidden), np.float32), positions=(0,))
REFUSED: list[tuple[dict[str, Any], type[StreamtapError]]] = [
    ({"prompts": ()}, InvalidInput),
    ({"prompts": ((5,) * 62,)}, PromptTooLong),
    ({"max_tokens": -1}, InvalidInput),
    ({"sampling": Sampling(temperature=-1)}, InvalidInput),
    ({"capture": CaptureAsk((3,))}, InvalidInput),
    ({"capture": CaptureAsk((1,)), "n": 2}, InvalidInput),
    ({"capture": CaptureAsk((1,)), "stream": True}, InvalidInput),
    ({"capture": CaptureAsk((1,), (5,))}, InvalidPositions),
    ({"steering": (SteeringVector((3,), VECTOR.vectors),)}, InvalidInput),
    ({"steering": (SteeringVector((1,), np.ones((1, 9), np.float32)),)}, InvalidInput),
    ({"steering": (SteeringVector((1,), VECTOR.vectors, spans=((0, 1),)),)}, SteeringUnsupported),
    ({"steering": (POSITIONED,)}, SteeringUnsupported),
    ({"steering": (POSITIONED,), "max_tokens": 1, "prompts": ((5,) * 40,)}, SteeringUnsupported),
    ({"steering": (VECTOR, SteeringVector((1,), VECTOR.vectors, norm_match=True))}, SteeringUnsupported),
]


@pytest.mark.parametrize(("values", "expected"), REFUSED)
def test_what_cannot_be_or_would_be_wrong_is_refused_at_once(
    engine: VllmEngine, opened: list[StubVllm], values: dict[str, Any], expected: type[StreamtapError]
) -> None:
    with pytest.raises(expected):
        engine.submit(request(**values), lambda _event: None)

    assert opened[0].calls == []


def test_more_tokens_than_it_lists_are_refused(opened: list[StubVllm]) -> None:
    engine = VllmEngine.load("/a/model", engine_options={"max_logprobs": 5})

    with pytest.raises(InvalidInput, match="at most 5"):
        engine.complete(IDS, max_tokens=1, logprobs=6)
    with pytest.raises(InvalidInput, match="at most 5"):
        engine.complete(IDS, max_tokens=1, prompt_logprobs=-1)
    assert engine.complete(IDS, max_tokens=1, logprobs=5).text == "("
    engine.close()


def test_prompts_with_single_positions_run_each_by_itself(engine: VllmEngine, opened: list[StubVllm]) -> None:
    engine.complete(request(prompts=(IDS, (5,)), max_tokens=1, steering=(POSITIONED,)))

    assert [len(call) for call in opened[0].calls] == [1, 1]


def test_a_finished_answer_is_the_last_event(engine: VllmEngine) -> None:
    inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
    engine.submit(request(stream=True), inbox.put)

    events = [inbox.get(timeout=5) for _ in range(4)]
    assert [type(event) for event in events] == [Delta, Delta, Delta, Finished]
