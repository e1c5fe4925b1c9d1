"""What vLLM with vllm-lens answers wrongly without a word, row by row as it was seen: refused, mended, or found out."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from streamtap.completion import SteeringVector
from streamtap.server.config import ModelConfig
from streamtap.server.pool.command_line import command_of
from streamtap.testing.stub_engine import BREAK, Script, completion
from streamtap.testing.stub_gateway import StubGateway
from streamtap.wire.steering import vector_body

Answer = Callable[..., bytes]
Make = Callable[..., NDArray[Any]]
ASK = {"model": "stub", "prompt": "a", "max_tokens": 3}


def _vector(*layers: int, hidden: int = 8, **about: Any) -> dict[str, Any]:
    return vector_body(SteeringVector(layers, np.ones((len(layers), hidden), np.float32), **about))


def _captures(layers: Any, **more: Any) -> dict[str, Any]:
    return ASK | {"output_residual_stream": layers} | more


def _steers(*vectors: dict[str, Any], **more: Any) -> dict[str, Any]:
    return ASK | {"apply_steering_vectors": list(vectors)} | more


NORMED, PLAIN = _vector(1, norm_match=True), _vector(1)
DEEP = vector_body(SteeringVector((1,), np.ones((1, 2, 8), np.float32), positions=(0, 1)))
#: What is sent, and the code with which it is refused before the engine hears of it.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "layers as a word": (_captures("false"), "invalid_request"),
    "layers as a number": (_captures(3), "invalid_request"),
    "a negative layer": (_captures([-1]), "invalid_request"),
    "a layer that the model lacks, beside one that it has": (_captures([3, 99]), "invalid_request"),
    "batched prompts with capture": (_captures([1], prompt=["a", "b"]), "unsupported"),
    "batched prompts with steering": (_steers(PLAIN, prompt=["a", "b"]), "steering_unsupported"),
    "n > 1 with capture": (_captures([1], n=2), "invalid_request"),
    "n > 1 with steering": (_steers(PLAIN, n=2), "steering_unsupported"),
    "a stream with capture": (_captures([1], stream=True), "invalid_request"),
    "steering with another hidden size": (_steers(_vector(1, hidden=7)), "invalid_request"),
    "two vectors with norm_match on one layer": (_steers(NORMED, NORMED), "steering_unsupported"),
    "norm_match behind a vector on one layer": (_steers(PLAIN, NORMED), "steering_unsupported"),
    "steering at a layer that the model lacks": (_steers(_vector(4)), "invalid_request"),
    "single positions of a generation": (_steers(DEEP), "steering_unsupported"),
    "spans of a generation": (_steers(PLAIN | {"position_spans": [[0, 1]]}), "steering_unsupported"),
    "a capture without a new token": (_captures([1], max_tokens=0), "unsupported"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_before_the_engine_hears_of_it(name: str, behind: Any, stub_vllm: Any) -> None:
    body, code = REFUSED[name]

    async def act(gateway: StubGateway, engine: Any) -> None:
        answer = await gateway.ask(body)

        assert (answer.status, answer.code) == (400, code)
        assert engine.bodies == []
        assert all(quota["used"] == 0 for quota in gateway.usage["usage"].values())

    behind(stub_vllm(Script([b"{}"])), act)


def test_no_capture_is_no_argument_and_every_layer_is_a_list(
    behind: Any, stub_vllm: Any, answer_of_vllm: Answer, made_rows: Make
) -> None:
    """``false`` would capture every layer, as anything does that is no list."""

    async def act(gateway: StubGateway, engine: Any) -> None:
        assert (await gateway.ask(_captures(False))).status == 200
        assert (await gateway.ask(_captures(True))).status == 200
        assert "vllm_xargs" not in engine.bodies[0]
        assert engine.bodies[1]["vllm_xargs"]["output_residual_stream"] == [0, 1, 2, 3]

    behind(stub_vllm(Script([answer_of_vllm(made_rows(4, 4), [0, 1], [2, 3, 4])])), act)


@pytest.mark.parametrize("rows", [(1, 4), (2, 3), (2, 5)], ids=["a layer", "a row", "a row too many"])
def test_rows_that_lack_without_a_word_are_missed(
    rows: tuple[int, int], behind: Any, stub_vllm: Any, answer_of_vllm: Answer, made_rows: Make
) -> None:
    """As where a vector of another width broke its layer's hook, or the prefix cache gave a part of the prompt."""

    async def act(gateway: StubGateway, engine: Any) -> None:
        answer = await gateway.ask(_captures([1, 2]))
        assert (answer.status, answer.code) == (500, "capture_failed")
        assert b'"data":' not in answer.body

    behind(stub_vllm(Script([answer_of_vllm(made_rows(*rows), [0, 1], [2, 3, 4])])), act)


def test_an_answer_without_the_rows_is_missed(behind: Any, stub_vllm: Any, answer_of_vllm: Answer) -> None:
    async def act(gateway: StubGateway, engine: Any) -> None:
        assert (await gateway.ask(_captures([1]))).code == "capture_failed"

    behind(stub_vllm(Script([answer_of_vllm(None, [0, 1], [2, 3, 4])])), act)


def test_norm_match_before_others_is_what_it_can(behind: Any, stub_vllm: Any) -> None:
    async def act(gateway: StubGateway, engine: Any) -> None:
        assert (await gateway.ask(_steers(NORMED, PLAIN, _vector(2, norm_match=True)))).status == 200
        assert len(json.loads(engine.bodies[0]["vllm_xargs"]["apply_steering_vectors"])) == 3

    behind(stub_vllm(Script([json.dumps(completion(completion_tokens=3)).encode()])), act)


def test_single_positions_of_a_prompt_that_runs_in_one_piece(behind: Any, stub_vllm: Any) -> None:
    async def act(gateway: StubGateway, engine: Any) -> None:
        assert (await gateway.ask(_steers(DEEP, max_tokens=1))).status == 200
        (sent,) = json.loads(engine.bodies[0]["vllm_xargs"]["apply_steering_vectors"])
        assert sent["position_indices"] == [0, 1]

    behind(stub_vllm(Script([json.dumps(completion()).encode()])), act)
    model = ModelConfig(id="m", checkpoint="org/m", engine="vllm")
    assert "--no-enable-chunked-prefill" in command_of(model, 80)


def test_a_steered_prompt_leaves_nothing_in_a_prefix_cache(behind: Any, stub_vllm: Any) -> None:
    async def act(gateway: StubGateway, engine: Any) -> None:
        for _ in range(2):
            await gateway.ask(_steers(PLAIN))
        salts = [body["cache_salt"] for body in engine.bodies]
        assert len(set(salts)) == 2

    behind(stub_vllm(Script([json.dumps(completion(completion_tokens=3)).encode()])), act)
    assert "--no-enable-prefix-caching" in command_of(ModelConfig(id="m", checkpoint="org/m", engine="vllm"), 80)


def test_no_id_of_a_request_is_the_beginning_of_anothers(behind: Any, stub_vllm: Any) -> None:
    """Steering would leak into that one; a caller's own id never gets there."""

    async def act(gateway: StubGateway, engine: Any) -> None:
        for own in ("a", "a-0", "a-0-1"):
            await gateway.ask(_steers(PLAIN), x_request_id=own)
        ids = [headers["x-request-id"] for headers in engine.headers]
        assert len(set(ids)) == 3
        assert len(set(map(len, ids))) == 1

    behind(stub_vllm(Script([json.dumps(completion(completion_tokens=3)).encode()])), act)


def test_an_engine_that_its_first_request_kills_is_a_dead_one(behind: Any, stub_vllm: Any) -> None:
    """As pipeline parallel without a GPU does: no answer passes for one, and the engine is started again."""

    async def act(gateway: StubGateway, engine: Any) -> None:
        answer = await gateway.ask(_captures([1]))

        assert (answer.status, answer.code) == (502, "engine_dead")
        assert answer.json["error"]["retryable"] is True
        assert [failure.code for failure in gateway.pool.failures] == ["engine_dead"]

    behind(stub_vllm(Script([BREAK])), act)
