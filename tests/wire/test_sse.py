"""Events of a stream, byte by byte."""

from __future__ import annotations

from streamtap.completion import Delta, TokenLog, Usage
from streamtap.errors import EngineDead
from streamtap.wire.sse import chunk_event, error_event, usage_event

HEAD = b'data: {"id":"c","object":"text_completion","created":7,"model":"m","choices":'


def test_a_chunk() -> None:
    delta = Delta(1, "é\n", finish_reason="stop", stop_reason="x")

    assert chunk_event(delta, id="c", created=7, model="m") == HEAD + (
        '[{"index":1,"text":"é\\n","logprobs":null,"finish_reason":"stop","stop_reason":"x"}]}\n\n'.encode()
    )


def test_a_chunk_with_log_probabilities_where_usage_comes_last() -> None:
    delta = Delta(0, "a", (TokenLog(5, "a", 3, -1.0, 1),))

    assert chunk_event(delta, id="c", created=7, model="m", include_usage=True) == HEAD + (
        b'[{"index":0,"text":"a","logprobs":{"tokens":["a"],"token_logprobs":[-1.0],"top_logprobs":[{"a":-1.0}],'
        b'"text_offset":[3]},"finish_reason":null,"stop_reason":null}],"usage":null}\n\n'
    )


def test_the_chunk_of_usage_has_no_choice() -> None:
    assert usage_event(Usage(2, 3), id="c", created=7, model="m") == HEAD + (
        b'[],"usage":{"prompt_tokens":2,"completion_tokens":3,"total_tokens":5}}\n\n'
    )


def test_a_late_error() -> None:
    assert error_event(EngineDead("the engine ended."), "r1") == (
        b'data: {"error":{"message":"the engine ended.","type":"server_error","code":"engine_dead",'
        b'"retryable":true},"request_id":"r1"}\n\n'
    )
