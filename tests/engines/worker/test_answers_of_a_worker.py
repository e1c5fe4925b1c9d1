from __future__ import annotations

import json
import queue
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from streamtap.completion import CaptureAsk, CompletionRequest, Event, Finished, Sampling, SteeringVector
from streamtap.engines.vllm import to_dialect
from streamtap.testing.fake_completer import FakeCompleter
from streamtap.testing.fake_text import text_of, written
from streamtap.wire.completions import read_completion, read_safetensors

HELLO = [0, 76, 73, 80, 80, 83]
CAPTURE = {"vllm_xargs": {"output_residual_stream": [1, 3]}}


def events_of(text: str) -> list[Any]:
    """The stream's events, comments left out; ``[DONE]`` stays a word."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def finished_of(request: CompletionRequest, engine: FakeCompleter) -> Finished:
    events: queue.Queue[Event] = queue.Queue()
    engine.submit(request, events.put)
    event = events.get(timeout=10)
    assert isinstance(event, Finished)
    return event


def test_a_completion_is_answered(served: Any) -> None:
    answer = served.post(headers={"X-Request-Id": "one-2_3"})

    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"] == "one-2_3"
    body = answer.json()
    assert body["choices"] == [
        {
            "index": 0,
            "text": text_of(written(HELLO, 3)),
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert body["usage"] == {"prompt_tokens": 6, "completion_tokens": 3, "total_tokens": 9}
    assert (body["id"], body["model"], body["object"]) == ("cmpl-one-2_3", "org/fake", "text_completion")


def test_a_request_id_that_is_none_is_replaced(served: Any) -> None:
    ids = [served.post(headers={"X-Request-Id": given}).headers["x-request-id"] for given in ("a b", "x" * 65, "")]

    assert all(len(each) == 32 and each.isalnum() for each in ids)
    assert len(set(ids)) == 3


@pytest.mark.parametrize("positions", ["all", "generated", (0, 7)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_capture_is_the_engines_rows(served: Any, positions: Any, dtype: Any) -> None:
    vector = SteeringVector((1,), np.ones((1, 8), np.float32), scale=2, spans=((1, 3),))
    request = CompletionRequest(
        prompts=("hello", "there"),
        max_tokens=4,
        sampling=Sampling(temperature=0),
        capture=CaptureAsk((1, 3), positions, dtype),
        steering=(vector,),
    )
    body = to_dialect(request, model="org/fake", stream=False, include_usage=False)
    expected = finished_of(request, served.engine)
    answers = [read_completion(served.post(body).content)]
    answers.append(read_safetensors(served.post(body, headers={"Accept": "application/vnd.safetensors"}).content))

    for answer in answers:
        for choice, own in zip(answer.choices, expected.choices, strict=True):
            assert choice.text == own.text
            assert choice.rows is not None
            assert own.rows is not None
            assert choice.rows.values.dtype == own.rows.values.dtype
            np.testing.assert_array_equal(choice.rows.values, own.rows.values)
            np.testing.assert_array_equal(choice.rows.token_ids, own.rows.token_ids)


def test_without_a_capture_there_is_no_file(served: Any) -> None:
    answer = served.post(headers={"Accept": "application/vnd.safetensors"})

    assert answer.headers["content-type"] == "application/json"


def test_a_stream_has_a_chunk_for_each_token(served: Any) -> None:
    answer = served.post({"stream": True})
    *chunks, done = events_of(answer.text)

    assert answer.headers["content-type"].startswith("text/event-stream")
    assert [chunk["choices"][0]["text"] for chunk in chunks] == list(text_of(written(HELLO, 3)))
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "length"]
    assert not any(chunk.get("usage") for chunk in chunks)
    assert done == "[DONE]"


def test_usage_streams_only_where_it_was_asked_for(served: Any) -> None:
    *_, usage, done = events_of(served.post({"stream": True, "stream_options": {"include_usage": True}}).text)

    assert usage["choices"] == []
    assert usage["usage"] == {"prompt_tokens": 6, "completion_tokens": 3, "total_tokens": 9}
    assert done == "[DONE]"


def test_a_silent_stream_is_kept_alive(serve: Any) -> None:
    with serve(FakeCompleter(token_seconds=0.25), keepalive_seconds=0.1) as served:
        text = served.post({"stream": True, "max_tokens": 2}).text

    assert text.startswith(": keepalive\n\n")
    assert text.count(": keepalive\n\n") >= 2
    assert len(events_of(text)) == 3


def test_a_late_error_ends_the_stream(serve: Any) -> None:
    with serve(FakeCompleter(fault="error", token_seconds=0.1)) as served:
        answer = served.post({"stream": True})
    *chunks, last = events_of(answer.text)

    assert answer.status_code == 200
    assert len(chunks) == 3
    assert last["error"]["message"] == "the fake engine was told to fail."
    assert last["request_id"] == answer.headers["x-request-id"]


def test_a_failure_before_the_first_token_keeps_its_status(serve: Any) -> None:
    with serve(FakeCompleter(fault="error")) as served:
        answer = served.post()

    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal_error"
    assert answer.json()["request_id"] == answer.headers["x-request-id"]


def test_answers_side_by_side_are_each_ones_own(serve: Any) -> None:
    with serve(FakeCompleter(token_seconds=0.01)) as served:
        prompts = ["hello", "hellp", "help", "held", "hem", "hen"] * 4
        with ThreadPoolExecutor(len(prompts)) as threads:
            answers = list(threads.map(lambda prompt: served.post({"prompt": prompt, **CAPTURE}), prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            ids = served.engine.tokenizer.tokenizer(prompt)["input_ids"]
            choice = read_completion(answer.content).choices[0]
            fed = ids + written(ids, 3)[:-1]
            assert choice.text == text_of(written(ids, 3))
            assert choice.rows is not None
            np.testing.assert_array_equal(choice.rows.values[1], served.engine.rows_engine.rows(fed, 3))
