"""A capture as one safetensors file, as the library itself reads it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from streamtap.completion import Choice, Finished, Rows, TokenLog, Usage
from streamtap.errors import InvalidInput
from streamtap.wire import safetensors_body
from streamtap.wire.safetensors_body import safetensors_answer


def file_of(finished: Finished) -> bytes:
    size, pieces = safetensors_answer(finished, id="cmpl-1", created=0, model="org/checkpoint")
    raw = b"".join(pieces)
    assert len(raw) == size
    return raw


def test_the_library_reads_rows_and_completion(captured: Finished, tmp_path: Path) -> None:
    path = tmp_path / "answer.safetensors"
    path.write_bytes(file_of(captured))
    rows = captured.choices[0].rows
    assert rows is not None

    with safe_open(path, framework="np") as opened:
        completion = json.loads(opened.metadata()["completion"])
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # it is no dict

    assert set(tensors) == {"residual_stream", "layer_indices", "token_ids", "positions"}
    assert tensors["residual_stream"].dtype == ml_dtypes.bfloat16
    assert np.array_equal(tensors["residual_stream"], rows.values)
    assert tensors["layer_indices"].tolist() == [1, 3]
    assert tensors["token_ids"].tolist() == [100, 101, 102]
    assert tensors["positions"].dtype == np.int32
    assert completion["usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
    assert completion["choices"][0] == {
        "index": 0,
        "text": "xy",
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": "z",
    }


def test_several_choices_have_tensors_of_their_own(batched: Finished, tmp_path: Path) -> None:
    path = tmp_path / "answer.safetensors"
    path.write_bytes(file_of(batched))

    with safe_open(path, framework="np") as opened:
        names = sorted(opened.keys())
        values = opened.get_tensor("residual_stream.1")

    assert names[2:6] == ["positions.0", "positions.1", "residual_stream.0", "residual_stream.1"]
    assert values.shape == (2, 1, 2)


def test_every_tensor_begins_at_a_multiple_of_its_item(rows: Callable[..., Rows]) -> None:
    odd = Finished((Choice(0, "", (5,), (6,), "length", rows=rows((0, 1, 2), [0], hidden=3)),), Usage(1, 1))
    raw = file_of(odd)
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])

    assert length % 8 == 0
    for name, tensor in header.items():
        if name != "__metadata__":
            assert tensor["data_offsets"][0] % {"I32": 4, "BF16": 2}[tensor["dtype"]] == 0


def test_an_answer_without_rows_is_its_completion_alone(logged: Finished, tmp_path: Path) -> None:
    path = tmp_path / "answer.safetensors"
    path.write_bytes(file_of(logged))

    with safe_open(path, framework="np") as opened:
        assert list(opened.keys()) == []
        assert len(json.loads(opened.metadata()["completion"])["choices"][0]["prompt_logprobs"]) == 2


class _LargeLogs:
    def __len__(self) -> int:
        return 1000

    def at(self, position: int) -> TokenLog:
        return TokenLog(1, "x" * 1000, 0, -1.0, 1)


def test_a_completion_too_large_for_a_header_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_body, "MOST_HEADER_BYTES", 50_000)
    finished = Finished((Choice(0, "", (1,), (2,), "length", prompt_logs=_LargeLogs()),), Usage(1000, 1))

    with pytest.raises(InvalidInput, match="ask for application/json"):
        safetensors_answer(finished, id="c", created=0, model="m")
