"""Captures, streams and steering, from the call to the rows, through the real bodies and a fake model."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

import httpx2
import numpy as np
import pytest

from streamtap.client.options import CompletionOptions
from streamtap.client.steering import steering_vector
from streamtap.completion import CaptureAsk, CompletionRequest, Event, Finished, Usage
from streamtap.errors import CaptureMissed, InvalidInput
from streamtap.testing.fake_completer import FakeCompleter

Ask = Callable[..., Any]
PROMPT = "The sky is"


def _alone(request: CompletionRequest) -> Finished:
    """What the model itself gives."""
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    FakeCompleter(dtype="float32").submit(request, events.put)
    while not isinstance(event := events.get(timeout=20), Finished):
        pass
    return event


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_are_those_of_the_model(ask: Ask, service: Any, binary: bool, dtype: Any) -> None:
    options = CompletionOptions(max_tokens=5, output_residual_stream=[3, 1, 3], output_dtype=dtype)

    found = ask(service, "complete", PROMPT, binary=binary, **options)

    request = CompletionRequest((PROMPT,), 5, capture=CaptureAsk((1, 3), dtype=dtype))
    (choice,) = _alone(request).choices
    assert choice.rows is not None
    acts = found.activations
    assert found.text == choice.text
    assert acts.layers == (1, 3)
    assert acts.offsets.tolist() == [0, len(choice.prompt_ids) + 4]
    assert acts.token_ids.tolist() == choice.rows.token_ids.tolist()
    assert acts.positions.tolist() == choice.rows.positions.tolist()
    for place, layer in enumerate((1, 3)):
        assert acts.acts[layer].dtype.name == dtype
        np.testing.assert_array_equal(acts.acts[layer], choice.rows.values[place])


@pytest.mark.parametrize("binary", [False, True])
def test_several_prompts_have_rows_each(ask: Ask, service: Any, binary: bool) -> None:
    prompts = ["one", "a longer one", "three"]

    found = ask(service, "complete", prompts, binary=binary, max_tokens=3, output_residual_stream=True)

    alone = [ask(service, "complete", each, max_tokens=3, output_residual_stream=True) for each in prompts]
    assert found.activations.layers == (0, 1, 2, 3)
    assert [choice.text for choice in found.choices] == [each.text for each in alone]
    for i, each in enumerate(alone):
        for layer, rows in found.activations.prompt(i).items():
            np.testing.assert_array_equal(rows, each.activations.acts[layer])


@pytest.mark.parametrize("positions", ["last", "prompt", "generated", [0, 2, 400]])
def test_chosen_positions_come_back(ask: Ask, service: Any, positions: Any) -> None:
    every = ask(service, "complete", PROMPT, max_tokens=500, seed=1, output_residual_stream=[2]).activations

    found = ask(
        service, "complete", PROMPT, max_tokens=500, seed=1, output_residual_stream=[2], output_positions=positions
    ).activations

    chosen = np.isin(every.positions, found.positions)
    assert 0 < len(found.positions) < len(every.positions)
    np.testing.assert_array_equal(found.acts[2], every.acts[2][chosen])


def test_a_whole_request_runs_on_a_server_as_it_is(ask: Ask, service: Any) -> None:
    request = CompletionRequest((PROMPT,), 4, capture=CaptureAsk((0, 2), "prompt", "float32"))

    found = ask(service, "complete", request, model="llama")

    (choice,) = _alone(request).choices
    assert service.asked[0]["model"] == "llama"
    assert found.text == choice.text
    assert choice.rows is not None
    np.testing.assert_array_equal(found.activations.acts[2], choice.rows.values[1])


def test_a_steered_stream_is_that_of_the_model(ask: Ask, service: Any) -> None:
    vector = steering_vector(np.arange(8), 1, 3.0)

    deltas, usage = ask(service, "stream", PROMPT, max_tokens=6, apply_steering_vectors=[vector])

    whole = ask(service, "complete", PROMPT, max_tokens=6, apply_steering_vectors=[vector])
    assert "".join(delta.text for delta in deltas) == whole.text
    assert deltas[-1].finish_reason == whole.choices[0].finish_reason
    assert usage == whole.usage
    assert service.asked[0]["stream_options"] == {"include_usage": True}
    assert service.asked[0]["apply_steering_vectors"] == [vector]


def test_usage_need_not_be_asked_for(ask: Ask, service: Any) -> None:
    ask(service, "stream", PROMPT, max_tokens=2, include_usage=False)

    assert "stream_options" not in service.asked[0]


def test_what_the_server_refuses_is_raised(ask: Ask, service: Any) -> None:
    with pytest.raises(InvalidInput, match="layer"):
        ask(service, "complete", PROMPT, max_tokens=2, output_residual_stream=[9])


def test_binary_is_for_captures(ask: Ask, service: Any) -> None:
    with pytest.raises(InvalidInput, match="binary=True is for captures"):
        ask(service, "complete", PROMPT, binary=True)
    assert service.asked == []


def test_a_server_that_knows_no_binary_body_may_answer_json(ask: Ask, service: Any) -> None:
    def json_only(request: httpx2.Request) -> httpx2.Response:
        request.headers["accept"] = "application/json"
        return service(request)

    found = ask(json_only, "complete", PROMPT, binary=True, output_residual_stream=[1])

    assert found.activations.layers == (1,)


@pytest.mark.parametrize("fault", ["missing_layer", "short", "nan"])
@pytest.mark.parametrize("binary", [False, True])
def test_a_capture_that_is_not_whole_is_refused(ask: Ask, service: Any, fault: Any, binary: bool) -> None:
    """The public service says that it may send such a one: its hooks fail with no more than a line in a log."""
    service.engine = FakeCompleter(dtype="float32", fault=fault)

    with pytest.raises(CaptureMissed):
        ask(service, "complete", PROMPT, binary=binary, max_tokens=3, output_residual_stream=[1, 2])


def _without(service: Any, change: Callable[[dict[str, Any]], None]) -> Callable[[httpx2.Request], httpx2.Response]:
    def handler(request: httpx2.Request) -> httpx2.Response:
        body = service(request).json()
        change(body)
        return httpx2.Response(200, json=body)

    return handler


def test_an_answer_without_what_only_this_service_tells_is_read(ask: Ask, service: Any) -> None:
    """The public service sends neither ``layer_indices`` nor ``token_ids``."""

    def bare(body: dict[str, Any]) -> None:
        body["activations"] = {"residual_stream": body["activations"]["residual_stream"]}

    some = ask(_without(service, bare), "complete", PROMPT, max_tokens=3, output_residual_stream=[3, 1])
    every = ask(_without(service, bare), "complete", PROMPT, max_tokens=3, output_residual_stream=True)

    assert some.activations.layers == (1, 3)
    assert every.activations.layers == (0, 1, 2, 3)
    np.testing.assert_array_equal(some.activations.acts[3], every.activations.acts[3])
    assert every.activations.positions.tolist() == list(range(every.usage.total_tokens - 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body: body.pop("activations"), "a capture was asked for, and the answer holds none"),
        (lambda body: body["usage"].update(completion_tokens=9), "rows"),
        (lambda body: body["activations"].update(layer_indices=[1, 3]), "layer"),
    ],
    ids=["none", "rows", "layers"],
)
def test_an_answer_that_lacks_rows_is_refused(ask: Ask, service: Any, change: Any, message: str) -> None:
    with pytest.raises(CaptureMissed, match=message):
        ask(_without(service, change), "complete", PROMPT, max_tokens=3, output_residual_stream=[1, 2])


def test_usage_is_told(ask: Ask, service: Any) -> None:
    found = ask(service, "complete", PROMPT, max_tokens=3)

    assert found.usage == Usage(found.usage.prompt_tokens, 3)
