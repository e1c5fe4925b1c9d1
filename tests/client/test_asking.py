"""What both clients do with what a server, or whatever stands in its place, may answer."""

from __future__ import annotations

import asyncio
import json
import logging
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest

from streamtap.client.aio import AsyncClient
from streamtap.client.retrying import Retries
from streamtap.client.sync import Client
from streamtap.errors import (
    ColdStart,
    EngineDead,
    EngineFailed,
    InvalidInput,
    InvalidKey,
    KeyRefused,
    ModelNotFound,
    NotFound,
    QueueFull,
    RateLimited,
    RequestTooLarge,
    StreamtapError,
    TransferFailed,
)
from streamtap.wire.errors import error_body

KEY = "stp_abcdefgh_secret"
COMPLETION: dict[str, Any] = {
    "id": "cmpl-1",
    "object": "text_completion",
    "created": 0,
    "model": "org/checkpoint",
    "usage": {"prompt_tokens": 5, "completion_tokens": 1, "total_tokens": 6},
    "choices": [{"index": 0, "text": " blue", "logprobs": None, "finish_reason": "length", "stop_reason": None}],
}
Ask = Callable[..., Any]


def _error(error: StreamtapError, retry_after_seconds: int | None = None) -> bytes:
    error.retry_after_seconds = retry_after_seconds
    return error_body(error, "r-1")


def _answers(*responses: httpx2.Response | httpx2.RequestError) -> Callable[[httpx2.Request], httpx2.Response]:
    left = list(responses)

    def handler(request: httpx2.Request) -> httpx2.Response:
        response = left.pop(0)
        if isinstance(response, httpx2.RequestError):
            raise response
        return response

    return handler


def _json(content: bytes | dict[str, Any], status: int = 200, **headers: str) -> httpx2.Response:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return httpx2.Response(status, content=body, headers={"content-type": "application/json"} | headers)


def test_white_space_before_the_json_is_a_cold_start_that_went_well(ask: Ask) -> None:
    completion = ask(_answers(_json(b" \n" * 50 + json.dumps(COMPLETION).encode())), "complete", "The sky is")

    assert (completion.text, completion.model, completion.usage.total_tokens) == (" blue", "org/checkpoint", 6)
    assert completion.activations is None


def test_a_late_error_inside_a_200_is_raised_as_its_class(ask: Ask) -> None:
    with pytest.raises(EngineDead, match="it ended") as caught:
        ask(_answers(_json(b"   " + _error(EngineDead("it ended")))), "complete", "text")

    assert caught.value.request_id == "r-1"  # type: ignore[attr-defined]


def test_a_cold_start_that_took_too_long_is_asked_again(ask: Any) -> None:
    cold = _json(b"   " + _error(ColdStart("not ready"), 30))

    assert ask(_answers(cold, cold, _json(COMPLETION)), "complete", "text").text == " blue"
    assert ask.waits == [30.0, 30.0]


def test_a_full_queue_is_asked_again_when_the_server_says(ask: Any) -> None:
    full = _json(_error(QueueFull("full"), 5), 429)

    assert ask(_answers(full, _json(COMPLETION)), "complete", "text").text == " blue"
    assert ask.waits == [5.0]


def test_the_header_says_when_where_the_body_does_not(ask: Any) -> None:
    busy = httpx2.Response(503, text="<html>busy</html>", headers={"Retry-After": "7"})

    assert ask(_answers(busy, _json(COMPLETION)), "complete", "text").text == " blue"
    assert ask.waits == [7.0]


@pytest.mark.parametrize(
    ("status", "error"), [(400, ModelNotFound("no 'x'; there are a, b")), (401, InvalidKey("unknown key"))]
)
def test_a_refusal_is_raised_as_its_class_and_not_asked_again(ask: Any, status: int, error: StreamtapError) -> None:
    with pytest.raises(type(error), match=str(error).split(";")[0]):
        ask(_answers(_json(_error(error), status)), "complete", "text")

    assert ask.waits == []


@pytest.mark.parametrize(
    ("status", "kind"),
    [(401, KeyRefused), (404, NotFound), (413, RequestTooLarge), (502, EngineFailed), (500, StreamtapError)],
)
@pytest.mark.parametrize("content", [b"<html>nginx</html>", b"", b"[]", b'{"detail": "no"}', b"[" * 100_000])
def test_what_is_not_this_services_error_is_judged_by_its_status(
    ask: Ask, status: int, kind: type[StreamtapError], content: bytes
) -> None:
    with pytest.raises(kind, match=f"answered {status} without a reason; is its address right"):
        ask(_answers(_json(content, status)), "complete", "text")


def test_a_redirect_is_not_followed_with_the_key(ask: Ask) -> None:
    moved = httpx2.Response(307, headers={"location": "http://elsewhere/v1/completions"})

    with pytest.raises(InvalidInput, match="answers 307: what is asked lies elsewhere"):
        ask(_answers(moved), "complete", "text")


@pytest.mark.parametrize("content", [b'{"id": "cmpl-1", "choices": [', b"", b"   ", b"<html>", b"[1]"])
def test_an_answer_that_is_no_json_is_a_failed_transfer(ask: Any, content: bytes) -> None:
    with pytest.raises(TransferFailed, match=r"is not the JSON that was expected: it broke off"):
        ask(_answers(_json(content)), "complete", "text")

    assert ask.waits == []


def test_a_large_answer_that_broke_off_is_a_failed_transfer(ask: Ask) -> None:
    with pytest.raises(TransferFailed):
        ask(_answers(_json(b'{"id": "' + b"a" * (1 << 21))), "complete", "text")


def test_a_connection_that_fails_before_an_answer_is_tried_again(ask: Any) -> None:
    failed = [httpx2.ConnectError("Connection refused"), httpx2.RemoteProtocolError("closed"), httpx2.ReadError("")]

    assert ask(_answers(*failed, _json(COMPLETION)), "complete", "text").text == " blue"
    assert ask.waits == [0.5, 1.0, 2.0]


def test_a_server_that_is_not_there_is_named(ask: Ask) -> None:
    gone = _answers(*[httpx2.ConnectError("Connection refused")] * 4)

    with pytest.raises(TransferFailed, match=r"http://server/v1 cannot be reached \(Connection refused\)"):
        ask(gone, "complete", "text")


def test_a_silence_is_not_asked_again(ask: Any) -> None:
    with pytest.raises(TransferFailed, match="sent nothing for as long as timeout_seconds"):
        ask(_answers(httpx2.ReadTimeout("")), "complete", "text")

    assert ask.waits == []


class _Breaking(httpx2.SyncByteStream, httpx2.AsyncByteStream):
    """A body that ends in the middle."""

    def __init__(self, *chunks: bytes) -> None:
        self._chunks = chunks
        self.closed = self.read = 0

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._chunks:
            self.read += 1
            yield chunk
        raise httpx2.RemoteProtocolError("peer closed connection")

    async def __aiter__(self) -> Any:
        for chunk in self:
            yield chunk

    def close(self) -> None:
        self.closed += 1

    async def aclose(self) -> None:
        self.closed += 1


def test_an_answer_that_broke_off_is_not_asked_again(ask: Any) -> None:
    body = _Breaking(b'{"id": ')

    with pytest.raises(TransferFailed, match=r"broke off \(RemoteProtocolError\)"):
        ask(_answers(httpx2.Response(200, stream=body)), "complete", "text")

    assert ask.waits == []
    assert body.closed


def _events(*events: bytes) -> httpx2.Response:
    return httpx2.Response(200, content=b"".join(events), headers={"content-type": "text/event-stream"})


def _chunk(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "text": text}]}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def test_a_stream_is_asked_again_while_nothing_of_it_was_given(ask: Any) -> None:
    full = _json(_error(RateLimited("too many"), 60), 429)
    cold = _events(b": keepalive\n\n", b"data: " + _error(ColdStart("not ready"), 30) + b"\n\n")

    deltas, usage = ask(_answers(full, cold, _events(_chunk("a"), _chunk("b"), DONE)), "stream", "text")

    assert [delta.text for delta in deltas] == ["a", "b"]
    assert usage is None
    assert ask.waits == [60.0, 30.0]


def test_a_late_error_of_a_stream_is_raised_after_its_text(ask: Any) -> None:
    late = _events(_chunk("a"), b"data: " + _error(ColdStart("not ready"), 30) + b"\n\n")

    with pytest.raises(ColdStart):
        ask(_answers(late), "stream", "text")

    assert ask.waits == []


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (lambda: _events(_chunk("a")), "the stream broke off before its end"),
        (lambda: _events(), "the stream broke off before its end"),
        (lambda: _json(COMPLETION), "it does not stream"),
    ],
    ids=["after text", "empty", "whole body"],
)
def test_a_stream_that_is_none_is_a_failed_transfer(
    ask: Ask, response: Callable[[], httpx2.Response], message: str
) -> None:
    with pytest.raises(TransferFailed, match=message):
        ask(_answers(response()), "stream", "text")


def test_a_stream_whose_connection_ends_is_a_failed_transfer_and_closed(ask: Ask) -> None:
    body = _Breaking(_chunk("a"), _chunk("b"))

    with pytest.raises(TransferFailed, match=r"broke off \(RemoteProtocolError\)"):
        ask(
            _answers(httpx2.Response(200, stream=body, headers={"content-type": "text/event-stream"})), "stream", "text"
        )

    assert body.closed


@pytest.mark.parametrize("end", [_chunk("a") + DONE, DONE], ids=["text", "nothing"])
def test_a_stream_is_read_to_its_very_end(ask: Ask, end: bytes) -> None:
    """A server sees who hangs up between the last event and the end as one who left."""
    body = _Breaking(end, b": bye\n\n")

    deltas, _ = ask(
        _answers(httpx2.Response(200, stream=body, headers={"content-type": "text/event-stream"})), "stream", "x"
    )

    assert len(deltas) == (1 if end != DONE else 0)
    assert body.read == 2
    assert body.closed


def test_nothing_is_sent_before_the_first_delta_is_asked_for() -> None:
    with Client("http://server/v1", KEY, transport=httpx2.MockTransport(_answers())) as client:
        client.stream("text").close()


def test_a_stream_that_is_left_is_closed() -> None:
    body = _Breaking(_chunk("a"), _chunk("b"))
    handler = _answers(httpx2.Response(200, stream=body, headers={"content-type": "text/event-stream"}))

    with (
        Client("http://server/v1", KEY, transport=httpx2.MockTransport(handler)) as client,
        client.stream("x") as stream,
    ):
        assert next(stream).text == "a"
        assert not body.closed
    assert body.closed


def test_an_async_stream_that_is_left_is_closed() -> None:
    body = _Breaking(_chunk("a"), _chunk("b"))
    handler = _answers(httpx2.Response(200, stream=body, headers={"content-type": "text/event-stream"}))

    async def main() -> None:
        async with AsyncClient("http://server/v1", KEY, transport=httpx2.MockTransport(handler)) as client:
            async with client.stream("x") as stream:
                assert (await anext(stream)).text == "a"
                assert not body.closed
            assert body.closed

    asyncio.run(main())


def test_models_status_and_usage(ask: Ask) -> None:
    paths = {
        "/v1/models": {"data": [{"id": "llama"}]},
        "/v1/models/a%2Fb/status": {"warm": True},
        "/v1/usage": {"u": 1},
    }

    def handler(request: httpx2.Request) -> httpx2.Response:
        assert request.method == "GET"
        return _json(paths[request.url.raw_path.decode()])

    assert ask(handler, "models") == [{"id": "llama"}]
    assert ask(handler, "model_status", "a/b") == {"warm": True}
    assert ask(handler, "usage") == {"u": 1}


def test_models_of_another_service_are_refused(ask: Ask) -> None:
    with pytest.raises(TransferFailed, match="has no 'data'"):
        ask(_answers(_json({"models": []})), "models")


def test_the_key_is_in_no_error_and_no_log(ask: Ask, caplog: pytest.LogCaptureFixture) -> None:
    """V40: whatever goes wrong, and whatever the library says of it."""
    caplog.set_level(logging.DEBUG)
    failures = [
        httpx2.LocalProtocolError(f"Illegal header value b'Bearer {KEY}'"),
        httpx2.ReadTimeout(KEY),
        httpx2.RemoteProtocolError(KEY),
        _json(_error(InvalidKey("unknown key")), 401),
        _json(b"", 500),
    ]
    texts = []
    for failure in failures:
        with pytest.raises(StreamtapError) as caught:
            ask(_answers(failure), "complete", "text", retries=None)
        texts += [*traceback.format_exception(caught.value), repr(caught.value)]

    assert [text for text in [*texts, caplog.text] if "secret" in text] == []


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_a_timeout_must_be_a_time(seconds: float) -> None:
    with pytest.raises(InvalidInput, match="timeout_seconds must be more than 0"):
        Client("http://server/v1", KEY, timeout_seconds=seconds)


def test_patience_can_be_chosen(ask: Any) -> None:
    full = _json(_error(QueueFull("full"), 5), 429)

    with pytest.raises(QueueFull):
        ask(_answers(full, full), "complete", "text", retries=Retries(longest_wait_seconds=4))
