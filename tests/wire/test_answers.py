"""Answers as JSON, byte by byte, and read back."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from streamtap.completion import Choice, Finished, Rows, TokenLog, Usage
from streamtap.wire.answers import json_answer


def pieces(finished: Finished) -> Iterator[bytes]:
    return json_answer(finished, id="cmpl-1", created=0, model="org/checkpoint")


def written(finished: Finished) -> bytes:
    return b"".join(pieces(finished))


def test_a_plain_answer_byte_by_byte(plain: Finished) -> None:
    assert list(pieces(plain)) == [
        b'{"id":"cmpl-1","object":"text_completion","created":0,"model":"org/checkpoint",'
        b'"usage":{"prompt_tokens":5,"completion_tokens":1,"total_tokens":6},'
        b'"choices":[{"index":0,"text":" blue","logprobs":null,"finish_reason":"length","stop_reason":null}]}'
    ]


def test_the_fixture_of_the_contract_byte_by_byte() -> None:
    values = np.array([[[1.0, -2.0], [0.5, 3.0]]], ml_dtypes.bfloat16)
    rows = Rows((4,), values, np.arange(2, dtype=np.int32), np.array([7, 8], np.int32))
    finished = Finished((Choice(0, "é", (7, 8), (9,), "length", rows=rows),), Usage(2, 1))

    assert list(pieces(finished)) == [
        (
            '{"id":"cmpl-1","object":"text_completion","created":0,"model":"org/checkpoint",'
            '"usage":{"prompt_tokens":2,"completion_tokens":1,"total_tokens":3},'
            '"choices":[{"index":0,"text":"é","logprobs":null,"finish_reason":"length","stop_reason":null}],'
            '"activations":{"residual_stream":{"dtype":"int16","original_dtype":"torch.bfloat16","shape":[1,2,2],'
            '"compression":"zstd","data":"KLUv/SAIQQAAgD8AwAA/QEA="},"layer_indices":[4],"token_ids":[7,8]}}'
        ).encode()
    ]


def test_usage_comes_before_choices_and_rows(captured: Finished, batched: Finished) -> None:
    for finished in (captured, batched):
        raw = written(finished)

        assert raw.index(b'"usage"') < raw.index(b'"choices"') < raw.index(b'"activations"')


def test_positions_are_told_where_they_are_not_all(captured: Finished, rows: Callable[..., Rows]) -> None:
    some = replace(captured.choices[0], rows=rows((1, 3), [0, 2]))

    assert "positions" not in json.loads(written(captured))["activations"]
    assert json.loads(written(replace(captured, choices=(some,))))["activations"]["positions"] == [0, 2]


def test_a_prompt_that_drew_nothing_has_all_its_rows(rows: Callable[..., Rows]) -> None:
    finished = Finished((Choice(0, "", (5, 6), (), "length", rows=rows((0,), [0, 1])),), Usage(2, 0))

    assert "positions" not in json.loads(written(finished))["activations"]


def test_several_choices_hold_their_own_rows(batched: Finished) -> None:
    answer = json.loads(written(batched))

    assert "activations" not in answer
    assert [choice["activations"]["residual_stream"]["shape"] for choice in answer["choices"]] == [[2, 1, 2], [2, 1, 2]]
    assert [choice["activations"].get("positions") for choice in answer["choices"]] == [[1], None]


def test_float32_says_so(rows: Callable[..., Rows]) -> None:
    finished = Finished((Choice(0, "", (5,), (6,), "length", rows=rows((0,), [0], dtype="float32")),), Usage(1, 1))

    envelope = json.loads(written(finished))["activations"]["residual_stream"]

    assert (envelope["dtype"], envelope["original_dtype"]) == ("float32", "torch.float32")


def test_log_probabilities(logged: Finished) -> None:
    choice = json.loads(written(logged))["choices"][0]

    assert choice["stop_reason"] == 8
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "d"],
        "token_logprobs": [None, -2.0, -9999.0],
        "top_logprobs": [None, {"c": -0.5, "b": -2.0}, {"d": -9999.0}],
        "text_offset": [0, 1, 2],
    }
    assert choice["prompt_logprobs"] == [
        None,
        {
            "6": {"logprob": -2.0, "rank": 3, "decoded_token": "b"},
            "7": {"logprob": -0.5, "rank": 1, "decoded_token": "c"},
            "8": {"logprob": -9999.0, "rank": 2, "decoded_token": "d"},
        },
    ]


def test_a_large_answer_comes_in_pieces_as_it_is_made() -> None:
    noise = np.random.default_rng(0).standard_normal((8, 500, 1024)).astype(ml_dtypes.bfloat16)
    rows = Rows(tuple(range(8)), noise, np.arange(500, dtype=np.int32), np.zeros(500, np.int32))
    finished = Finished((Choice(0, "", (0,) * 500, (1,), "length", rows=rows),), Usage(500, 1))
    sizes = [len(piece) for piece in pieces(finished)]

    tracemalloc.start()
    total = sum(len(piece) for piece in pieces(finished))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert total == sum(sizes) > 7_000_000
    assert max(sizes) < 1_100_000
    assert most < 6_000_000


class _ManyLogs:
    """A prompt whose log-probabilities are large, and that remembers how far they were asked for."""

    def __init__(self) -> None:
        self.asked = 0

    def __len__(self) -> int:
        return 200

    def at(self, position: int) -> TokenLog:
        self.asked = position
        top = tuple((token, f"t{token}", -1.0) for token in range(1000))
        return TokenLog(5, "a", 0, -1.0 if position else None, 6, top if position else ())


def test_a_whole_vocabulary_is_written_position_by_position() -> None:
    logs = _ManyLogs()
    made = pieces(Finished((Choice(0, "", (5,) * 200, (1,), "length", prompt_logs=logs),), Usage(200, 1)))

    first = next(made)
    asked = logs.asked
    answer: dict[str, Any] = json.loads(first + b"".join(made))

    assert asked < 60
    assert len(answer["choices"][0]["prompt_logprobs"]) == 200
    assert len(answer["choices"][0]["prompt_logprobs"][199]) == 1000
