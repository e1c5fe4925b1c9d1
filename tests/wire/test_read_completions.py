"""Answers as a client holds them, from both kinds of body and from the public service's."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from streamtap.completion import Completion, Finished, Rows, Usage
from streamtap.errors import CaptureMissed, ColdStart, EngineFailed, StreamtapError
from streamtap.wire.answers import json_answer
from streamtap.wire.completions import read_completion, read_safetensors
from streamtap.wire.safetensors_body import safetensors_answer


def document(finished: Finished) -> dict[str, Any]:
    return json.loads(b"".join(json_answer(finished, id="cmpl-1", created=0, model="org/checkpoint")))


def from_json(finished: Finished) -> Completion:
    return read_completion(b"".join(json_answer(finished, id="cmpl-1", created=0, model="org/checkpoint")))


def from_file(finished: Finished) -> Completion:
    return read_safetensors(b"".join(safetensors_answer(finished, id="cmpl-1", created=0, model="org/checkpoint")[1]))


def test_a_plain_answer(plain: Finished) -> None:
    completion = from_json(plain)

    assert (completion.text, completion.model, completion.id) == (" blue", "org/checkpoint", "cmpl-1")
    assert completion.usage == Usage(5, 1)
    assert completion.activations is None
    assert completion.choices[0].finish_reason == "length"


@pytest.mark.parametrize("read", [from_json, from_file])
def test_rows_of_one_choice(read: Callable[[Finished], Completion], captured: Finished) -> None:
    completion = read(captured)
    acts, rows = completion.activations, captured.choices[0].rows
    assert acts is not None
    assert rows is not None

    assert acts.layers == (1, 3)
    assert acts.acts[3].dtype == ml_dtypes.bfloat16
    assert np.array_equal(acts.acts[3], rows.values[1])
    assert acts.offsets.tolist() == [0, 3]
    assert acts.token_ids.tolist() == [100, 101, 102]
    assert acts.positions.tolist() == [0, 1, 2]
    assert (acts.provenance.model, acts.provenance.dtype, acts.provenance.engine) == (
        "org/checkpoint",
        "bfloat16",
        "api",
    )
    assert (acts.provenance.commit, acts.provenance.hidden) == ("", 2)
    assert completion.choices[0].stop_reason == "z"


@pytest.mark.parametrize("read", [from_json, from_file])
def test_rows_of_several_choices_are_ragged(read: Callable[[Finished], Completion], batched: Finished) -> None:
    acts = read(batched).activations
    assert acts is not None

    assert len(acts) == 2
    assert acts.offsets.tolist() == [0, 1, 2]
    assert acts.positions.tolist() == [1, 0]
    assert np.array_equal(acts.prompt(1)[3], batched.choices[1].rows.values[1])  # type: ignore[union-attr]


def test_float32_stays_float32(captured: Finished, rows: Callable[..., Rows]) -> None:
    choice = replace(captured.choices[0], rows=rows((1, 3), [0, 1, 2], dtype="float32"))
    acts = from_json(replace(captured, choices=(choice,))).activations
    assert acts is not None

    assert acts.acts[1].dtype == np.float32
    assert acts.provenance.dtype == "float32"


def test_an_answer_of_the_public_service_names_its_layers_by_what_was_asked(captured: Finished) -> None:
    answer = document(captured)
    answer["activations"] = {"residual_stream": answer["activations"]["residual_stream"]}

    asked = read_completion(answer, layers=[3, 1, 3]).activations
    every = read_completion(answer).activations
    assert asked is not None
    assert every is not None

    assert asked.layers == (1, 3)
    assert every.layers == (0, 1)
    assert asked.token_ids.tolist() == [-1, -1, -1]
    assert asked.positions.tolist() == [0, 1, 2]


def test_log_probabilities_come_back(logged: Finished) -> None:
    choice = from_json(logged).choices[0]
    assert choice.logs is not None
    assert choice.prompt_logs is not None

    assert [(log.text, log.logprob, log.offset) for log in choice.logs] == [
        ("a", None, 0),
        ("b", -2.0, 1),
        ("d", -9999.0, 2),
    ]
    assert choice.logs[1].top == ((-1, "c", -0.5), (-1, "b", -2.0))
    assert len(choice.prompt_logs) == 2
    assert choice.prompt_logs.at(0).logprob is None
    log = choice.prompt_logs.at(1)
    assert (log.token_id, log.text, log.logprob, log.rank) == (6, "b", -2.0, 3)
    assert [token for token, _, _ in log.top] == [7, 8, 6]


def test_an_error_inside_a_200_is_raised_as_what_it_is() -> None:
    late = b'   {"error":{"message":"not ready","code":"modal_cold_boot","retry_after_seconds":30},"request_id":"r"}'

    with pytest.raises(ColdStart, match="not ready") as raised:
        read_completion(late)
    assert raised.value.retry_after_seconds == 30
    with pytest.raises(StreamtapError, match="it broke"):
        read_completion({"error": "it broke"})


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"{}", b'{"choices":[]}', b'{"choices":[1]}', b"<html>"])
def test_what_is_no_completion_is_said_to_be_none(raw: bytes) -> None:
    with pytest.raises(EngineFailed, match="the server's answer is not"):
        read_completion(raw)


def without(answer: dict[str, Any], **change: Any) -> dict[str, Any]:
    return answer | {"activations": answer["activations"] | change}


def test_rows_that_are_not_whole_are_refused(captured: Finished) -> None:
    answer = document(captured)
    envelope = answer["activations"]["residual_stream"]
    broken = [
        without(answer, layer_indices=[1]),
        without(answer, token_ids=[1, 2]),
        without(answer, residual_stream=None),
        without(answer, residual_stream=envelope | {"shape": [2, 3, 3]}),
        without(answer, residual_stream=envelope | {"shape": [2, 6]}),
        without(answer, residual_stream=envelope | {"data": None}),
        without(answer, residual_stream=envelope | {"data": envelope["data"][:-8]}),
        answer | {"usage": {"prompt_tokens": 3, "completion_tokens": 2}},
    ]
    for each in broken:
        with pytest.raises(CaptureMissed, match="answer"):
            read_completion(each)


def test_other_layers_than_were_asked_for_are_refused_by_name(captured: Finished) -> None:
    with pytest.raises(CaptureMissed, match=r"layers \[1, 2\] were asked for, the answer has \[1, 3\]") as raised:
        read_completion(document(captured), layers=[1, 2])
    assert raised.value.layer == 2


def test_rows_of_some_choices_only_are_refused(batched: Finished) -> None:
    answer = document(batched)
    held = answer["choices"][0].pop("activations")
    with pytest.raises(CaptureMissed, match="rows of 1 of 2 choices"):
        read_completion(answer)
    answer["choices"][1].pop("activations")
    with pytest.raises(CaptureMissed, match="rows of 1 of 2 choices"):
        read_completion(answer | {"activations": held})


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_values_that_are_not_finite_are_refused_by_layer(
    captured: Finished, rows: Callable[..., Rows], dtype: str, value: float
) -> None:
    bad = rows((1, 3), [0, 1, 2], dtype=dtype)
    bad.values[1, 2, 0] = value
    finished = replace(captured, choices=(replace(captured.choices[0], rows=bad),))

    for read in (from_json, from_file):
        with pytest.raises(CaptureMissed, match="layer 3 hold a value that is not finite") as raised:
            read(finished)
        assert raised.value.layer == 3


def test_a_file_that_was_cut_short_is_refused(captured: Finished) -> None:
    raw = b"".join(safetensors_answer(captured, id="c", created=0, model="m")[1])

    for end in (0, 4, 30, len(raw) - 1):
        with pytest.raises(EngineFailed, match="the server's answer is not a safetensors file"):
            read_safetensors(raw[:end])
    with pytest.raises(CaptureMissed, match="layers"):
        read_safetensors(raw, layers=[1])
