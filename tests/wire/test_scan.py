"""What an answer says of itself, seen on its way, however it is cut into pieces."""

from __future__ import annotations

import json
import random
import time
import tracemalloc
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamtap.completion import Finished, Usage
from streamtap.wire.answers import json_answer
from streamtap.wire.scan import BodyScanner, Envelope

CAPTURE = {
    "residual_stream": {"dtype": "int16", "shape": [2, 3, 4], "data": "QUJD" * 50, "compression": "zstd"},
    "layer_indices": [1, 2],
    "token_ids": [1, 2, 3],
}
ANSWER = {
    "id": 'x"}{\\',
    "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7},
    "choices": [
        {
            "text": 'a\\"b{[ "usage":{"prompt_tokens":9}',
            "prompt_logprobs": [None, {"1": {"x": [1, 2, {"]": "\\"}]}}],
            "error": {"message": "not this"},
            "activations": CAPTURE,
        },
        {"activations": None},
        {"usage": {"prompt_tokens": 9, "completion_tokens": 9}},
        {},
    ],
    "empty": [[], {}],
    "extra": {"activations": {"residual_stream": {"shape": [9, 9, 9], "data": "x"}}, "usage": {}},
    "error": {"message": 'a\\"', "code": "b"},
    "activations": CAPTURE,
}


def scanned(pieces: Iterable[bytes]) -> BodyScanner:
    scanner = BodyScanner()
    for piece in pieces:
        scanner.feed(piece)
    return scanner


def cut(raw: bytes, places: Iterable[int]) -> list[bytes]:
    marks = sorted({0, len(raw), *places})
    return [raw[start:stop] for start, stop in pairwise(marks)]


def seen(scanner: BodyScanner) -> tuple[Any, ...]:
    return (scanner.usage, scanner.error, scanner.envelopes, scanner.complete, scanner.broken, scanner.data_started)


def test_all_that_is_wanted_and_nothing_that_looks_like_it() -> None:
    scanner = scanned([b"  \n" + json.dumps(ANSWER).encode() + b"\n"])
    envelope = Envelope("int16", (2, 3, 4), (1, 2), True)

    assert seen(scanner) == (Usage(5, 2), {"message": 'a\\"', "code": "b"}, [envelope] * 2, True, False, True)
    assert scanner.shapes == [(2, 3, 4)] * 2


@settings(derandomize=True, max_examples=100, deadline=None)
@given(places=st.lists(st.integers(0, 1500), max_size=30))
def test_any_cut_gives_the_same(places: list[int]) -> None:
    raw = json.dumps(ANSWER).encode()

    assert seen(scanned(cut(raw, places))) == seen(scanned([raw]))


def test_byte_by_byte_gives_the_same() -> None:
    raw = json.dumps(ANSWER, indent=1).encode()

    assert seen(scanned(raw[i : i + 1] for i in range(len(raw)))) == seen(scanned([raw]))


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('ab"\\{}[]:, \n', max_size=12),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["usage", "choices", "activations", "residual_stream", '"\\']), inner, max_size=4
        )
    ),
    max_leaves=20,
)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(
    body=st.dictionaries(st.sampled_from(["a", "choices", "activations", "x\\"]), _JSON, max_size=5), seed=st.integers()
)
def test_every_json_object_is_followed_to_its_end(body: dict[str, Any], seed: int) -> None:
    raw = json.dumps({**body, "usage": {"prompt_tokens": 1, "completion_tokens": 2}}).encode()
    rng = random.Random(seed)

    scanner = scanned(cut(raw, [rng.randrange(len(raw)) for _ in range(rng.randrange(12))]))

    assert scanner.complete
    assert scanner.usage == Usage(1, 2)
    assert not scanned([raw[:-1]]).complete


@settings(derandomize=True, max_examples=60, deadline=None)
@given(depth=st.integers(1, 90), size=st.integers(0, 3000), seed=st.integers())
def test_long_nested_values_are_passed_exactly(depth: int, size: int, seed: int) -> None:
    rng = random.Random(seed)
    inner: Any = ["".join(rng.choice('{}[]"\\ab') for _ in range(rng.randrange(40))) for _ in range(size // 20)]
    for _ in range(depth):
        inner = [inner] if rng.random() < 0.5 else {"k": inner}
    raw = json.dumps({"skipped": inner, "usage": {"prompt_tokens": 1, "completion_tokens": 2}}).encode()

    scanner = scanned(cut(raw, [rng.randrange(len(raw)) for _ in range(5)]))

    assert (scanner.complete, scanner.usage) == (True, Usage(1, 2))


def test_what_is_known_when_the_data_begins(captured: Finished) -> None:
    raw = b"".join(json_answer(captured, id="c", created=0, model="m"))
    scanner = BodyScanner()

    scanner.feed(raw[: raw.index(b'"data"')])
    assert (scanner.usage, scanner.shapes, scanner.data_started) == (Usage(2, 2), [(2, 3, 2)], False)
    scanner.feed(raw[raw.index(b'"data"') : -1])
    assert (scanner.data_started, scanner.complete) == (True, False)
    assert scanner.envelopes[0].layer_indices == (1, 3)
    scanner.feed(raw[-1:])
    assert scanner.complete


@pytest.mark.parametrize(
    "raw",
    [
        b"{} x",
        b"{}{}",
        b"[1]",
        b'"x"',
        b"3",
        b'{"a":1,}',
        b'{"choices":[,]}',
        b'{"choices":[1,]}',
        b'{"a" 1}',
        b'{"usage":{"a":nope}}',
        b'{"usage":nope}',
        b'{"activations":{"residual_stream":{"shape":[1}}}}',
        b'{"a":1]',
        b"{,}",
        b"{1:2}",
        b'{"choices":}',
        b'{"\xff":1}',
        b'{"' + b"k" * 10_000,
    ],
)
def test_what_is_no_json_object_is_broken_and_never_complete(raw: bytes) -> None:
    scanner = scanned([raw])

    assert scanner.broken
    assert not scanner.complete
    scanner.feed(b"{}")
    assert not scanner.complete


def test_values_of_other_kinds_are_not_taken_for_what_is_wanted() -> None:
    raw = b"""{"usage": null, "error": null, "choices": null, "activations":
        {"residual_stream": {"dtype": 3, "shape": [1, true, 2], "data": "x"}, "layer_indices": "no"}}"""

    assert seen(scanned([raw])) == (None, None, [Envelope(data_started=True)], True, False, True)


def test_what_is_kept_is_small() -> None:
    scanner = scanned([b'{"error": "', *[b"x" * 1_000_000] * 6])

    assert scanner.broken


def test_half_a_gigabyte_of_rows_is_held_nowhere() -> None:
    start = json.dumps(ANSWER).encode()[:-1] + b',"activations":{"residual_stream":{"shape":[1,1,1],"data":"'
    chunk = b"QUJD" * 262_144
    scanner = scanned([start])

    tracemalloc.start()
    for _ in range(500):
        scanner.feed(chunk)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    scanner.feed(b'"},"layer_indices":[0]}}')

    assert scanner.complete
    assert most < 100_000


@pytest.mark.parametrize("junk", [b'a\\"', b"\\\\", b'{"a":["b"]},', b"[" * 50 + b"]" * 50 + b","])
def test_no_text_is_slow_to_pass(junk: bytes) -> None:
    many = junk * (2_000_000 // len(junk))
    raw = b'{"x":' + (b"[" + many + b"0]" if junk[:1] in b"{[" else b'"' + many + b'"') + b"}"

    begun = time.thread_time()
    scanner = scanned(raw[i : i + 65_536] for i in range(0, len(raw), 65_536))

    assert scanner.complete
    assert time.thread_time() - begun < 3.0
