from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamtap.client.streaming import DeltaReader, EventLines
from streamtap.completion import Delta, Usage
from streamtap.errors import EngineDead, TransferFailed
from streamtap.wire.errors import error_document


def _fed(*chunks: bytes) -> list[str]:
    lines = EventLines()
    return [data for chunk in chunks for data in lines.feed(chunk)]


def _event(**chunk: Any) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def _choice(text: str, **more: Any) -> dict[str, Any]:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": None, "stop_reason": None} | more


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_comments_are_dropped_and_lines_of_one_event_joined(end: bytes) -> None:
    lines = [b": keepalive", b"", b"data: one", b"data:two", b"data:  three", b"", b": again", b"data: four", b"", b""]

    assert _fed(end.join(lines)) == ["one\ntwo\n three", "four"]


def test_lines_may_end_in_carriage_returns_alone() -> None:
    assert _fed(b"data: one\r\rdata: two\r\rdata: ") == ["one", "two"]


def test_fields_of_other_names_and_a_byte_order_mark_are_dropped() -> None:
    stream = b"\xef\xbb\xbfdata: one\nevent: x\nid: 3\nretry: 10\ndatum: no\ndata\n\n"

    assert _fed(stream) == ["one\n"]


def test_an_event_that_never_ends_is_no_event() -> None:
    assert _fed(b"data: one\n\ndata: two\n") == ["one"]


@given(st.lists(st.integers(0, 70), max_size=12), st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_it_does_not_matter_where_the_bytes_are_cut(cuts: list[int], end: bytes) -> None:
    stream = end.join(["data: Grüße 😀".encode(), b": no", b"data: two", b"", b"data: three", b"", b"x"])
    places = sorted({0, len(stream), *(min(cut, len(stream)) for cut in cuts)})
    chunks = [stream[start:stop] for start, stop in pairwise(places)]

    assert _fed(*chunks) == ["Grüße 😀\ntwo", "three"]


def test_deltas_and_usage_are_read() -> None:
    reader = DeltaReader()
    reader.feed(_event(choices=[_choice(" blue")], usage=None))
    reader.feed(_event(choices=[_choice("!", finish_reason="stop", stop_reason=".")]))
    reader.feed(_event(choices=[], usage={"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}))
    reader.feed(b"data: [DONE]\n\n")

    assert reader.take() == [Delta(0, " blue"), Delta(0, "!", finish_reason="stop", stop_reason=".")]
    reader.end()
    assert (reader.usage, reader.done) == (Usage(5, 2), True)


@pytest.mark.parametrize("usage", [{}, {"usage": None}])
def test_a_stream_without_usage_is_read(usage: dict[str, None]) -> None:
    reader = DeltaReader()
    reader.feed(_event(choices=[_choice("a")], **usage) + _event(choices=[], **usage) + b"data: [DONE]\n\n")

    assert [delta.text for delta in reader.take()] == ["a"]
    reader.end()
    assert reader.usage is None


def test_log_probabilities_of_a_chunk_are_read() -> None:
    logprobs = {
        "tokens": [" blue"],
        "token_logprobs": [-0.5],
        "top_logprobs": [{" blue": -0.5, " red": -1.5}],
        "text_offset": [12],
    }
    reader = DeltaReader()
    reader.feed(_event(choices=[_choice(" blue", logprobs=logprobs)]))
    (log,) = reader.take()[0].logs

    assert (log.text, log.logprob, log.offset) == (" blue", -0.5, 12)
    assert [(text, value) for _, text, value in log.top] == [(" blue", -0.5), (" red", -1.5)]


def test_a_late_error_comes_after_the_text_before_it_as_its_class() -> None:
    reader = DeltaReader()
    late = json.dumps(error_document(EngineDead("it ended"), "r-1")).encode()
    reader.feed(_event(choices=[_choice("a")]) + b"data: " + late + b"\n\n")

    assert [delta.text for delta in reader.take()] == ["a"]
    with pytest.raises(EngineDead, match="it ended"):
        reader.take()
    with pytest.raises(EngineDead):
        reader.end()


def test_a_stream_that_ends_without_saying_so_broke_off() -> None:
    reader = DeltaReader()
    reader.feed(_event(choices=[_choice("a")]))
    reader.take()

    with pytest.raises(TransferFailed, match="broke off before its end"):
        reader.end()


@pytest.mark.parametrize(
    "data", ["{", "[1]", "null", '{"choices": [3]}', '{"choices": [], "usage": {"prompt_tokens": 1}}', "[" * 100_000]
)
def test_what_is_no_event_of_a_completion_is_a_failed_transfer(data: str) -> None:
    reader = DeltaReader()
    reader.feed(_event(choices=[_choice("a")]) + f"data: {data}\n\n".encode())

    assert [delta.text for delta in reader.take()] == ["a"]
    with pytest.raises(TransferFailed, match="the stream holds an event that is not"):
        reader.take()
