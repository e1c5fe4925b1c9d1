"""The parts of an answer are told apart however it is cut, and no text of a client's passes for one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamtap.errors import EngineFailed
from streamtap.server.relaying.envelope_text import EnvelopeText

VLLM = b'"residual_stream":{"data":"QUJD","dtype":"int16","shape":[1,2,3]}'
OURS = b'"residual_stream": {"dtype":"int16", "shape":[1,2,3],\n"data": "QUJD" }'


def _split(pieces: list[bytes]) -> list[tuple[str, bytes]]:
    """The parts, joined where one came in several pieces."""
    text, found = EnvelopeText(), []
    for piece in pieces:
        for part, more in text.feed(piece):
            if found and found[-1][0] == part:
                found[-1] = (part, found[-1][1] + more)
            else:
                found.append((part, more))
    rest = text.rest()
    if rest and found and found[-1][0] == "beside":
        return [*found[:-1], ("beside", found[-1][1] + rest)]
    return [*found, ("beside", rest)] if rest else found


def _cut(whole: bytes, size: int) -> list[bytes]:
    return [whole[at : at + size] for at in range(0, len(whole), size)]


@pytest.mark.parametrize("size", [1, 2, 7, 40, 10_000])
@pytest.mark.parametrize(
    ("envelope", "before", "after"),
    [
        (VLLM, b'{"data":"', b'","dtype":"int16","shape":[1,2,3]}'),
        (OURS, b'{"dtype":"int16", "shape":[1,2,3],\n"data": "', b'" }'),
    ],
)
def test_an_envelope_is_found_whichever_way_it_is_written(
    envelope: bytes, before: bytes, after: bytes, size: int
) -> None:
    lead = b'{"usage":{"prompt_tokens":1},"activations":{'

    found = _split(_cut(lead + envelope + b',"layer_indices":[0]}}', size))

    assert found[0] == ("beside", lead + envelope[: envelope.index(b"{")])
    assert found[1:4] == [("before", before), ("data", b"QUJD"), ("after", after)]
    assert found[4] == ("beside", b',"layer_indices":[0]}}')


def test_two_envelopes_are_two() -> None:
    found = _split([b"[{" + VLLM + b"},{" + VLLM + b"}]"])

    assert [part for part, _ in found].count("data") == 2


def test_data_that_is_empty_is_none() -> None:
    found = _split([b'{"residual_stream":{"data":"","shape":[]}}'])

    assert [part for part, _ in found] == ["beside", "before", "after", "beside"]


_TEXTS = st.sampled_from(
    ['"residual_stream":{"data":"AAAA"}', '\\"residual_stream":{"data":"', 'residual_stream"', "\\", '"', "é", "{"]
)


@settings(derandomize=True, max_examples=100, deadline=None)
@given(texts=st.lists(_TEXTS, max_size=6), size=st.integers(1, 30))
def test_a_text_never_passes_for_an_envelope(texts: list[str], size: int) -> None:
    text = "".join(texts)
    tops: list[Any] = [{text: -0.5}]
    whole = json.dumps({"choices": [{"text": text, "logprobs": {"tokens": [text], "top_logprobs": tops}}]}).encode()

    assert _split(_cut(whole, size)) == [("beside", whole)]


def test_an_envelope_that_does_not_end_is_the_engines_failure() -> None:
    with pytest.raises(EngineFailed, match="without an end"):
        _split([b'{"residual_stream":{"data":"AAAA","x":"' + b"y" * 5000])


def test_what_is_held_is_small() -> None:
    text = EnvelopeText()
    sent = b'{"residual_stream":' + b"[1]," * 5000

    passed = b"".join(more for piece in _cut(sent, 100) for _, more in text.feed(piece))

    assert len(sent) - len(passed) < 5000
    assert passed + text.rest() == sent
