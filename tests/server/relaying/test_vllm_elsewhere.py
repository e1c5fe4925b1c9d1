"""An engine that runs elsewhere, or that a command starts: it is asked what it is, and a vLLM is treated as one."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamtap.completion import SteeringVector
from streamtap.server.config import ModelConfig
from streamtap.testing.stub_engine import Script, completion
from streamtap.testing.stub_gateway import StubGateway
from streamtap.wire.steering import vector_body

Answer = Callable[..., bytes]
Make = Callable[..., NDArray[Any]]
PROMPT, NEW = [0, 1], [2, 3, 4]
ASK = {"model": "stub", "prompt": "a", "max_tokens": 3}
CAPTURE = ASK | {"output_residual_stream": [1, 2]}
VECTOR = vector_body(SteeringVector((1,), np.ones((1, 8), np.float32)))
SPANS = VECTOR | {"position_spans": [[1, 99]]}
DEEP = vector_body(SteeringVector((1,), np.ones((1, 2, 8), np.float32), positions=(0, 1)))


def test_a_far_engine_is_asked_what_it_is(
    behind: Any, stub_vllm: Any, answer_of_vllm: Answer, made_rows: Make, far_model: ModelConfig
) -> None:
    raw = answer_of_vllm(made_rows(2, 4), PROMPT, NEW)

    async def of_a_vllm(gateway: StubGateway, engine: Any) -> None:
        assert (await gateway.ask(ASK)).status == 200
        for _ in range(2):
            answer = await gateway.ask(CAPTURE | {"output_positions": "last"})
            assert answer.json["activations"]["layer_indices"] == [1, 2]
            assert answer.json["activations"]["positions"] == [3]
        assert engine.looks.count("/v1/models") == 1
        assert "output_positions" not in engine.bodies[-1]["vllm_xargs"]

    async def of_ours(gateway: StubGateway, engine: Any) -> None:
        answer = await gateway.ask(CAPTURE | {"apply_steering_vectors": [SPANS]})
        assert answer.body == raw
        (vector,) = json.loads(engine.bodies[-1]["vllm_xargs"]["apply_steering_vectors"])
        assert vector["position_spans"] == [[1, 99]]
        assert engine.looks == ["/v1/models"]

    by_command = ModelConfig(id="stub", checkpoint="org/stub", command=("run", "{port}"))
    for model in (far_model, by_command):
        behind(stub_vllm(Script([raw])), of_a_vllm, model)
        behind(stub_vllm(Script([raw]), owner="streamtap"), of_ours, model)


def test_several_greedy_samples_are_asked_of_a_far_vllm_as_it_takes_them(
    behind: Any, stub_vllm: Any, far_model: ModelConfig
) -> None:
    asked = ASK | {"n": 2, "temperature": 0}

    async def of_a_vllm(gateway: StubGateway, engine: Any) -> None:
        assert (await gateway.ask(asked)).status == 200
        assert (await gateway.ask(asked | {"stream": True})).status == 200
        assert [(body["temperature"], body["top_k"]) for body in engine.bodies] == [(1.0, 1)] * 2
        assert engine.looks == ["/v1/models"]

    async def of_ours(gateway: StubGateway, engine: Any) -> None:
        assert (await gateway.ask(asked)).status == 200
        assert engine.bodies[0]["temperature"] == 0

    raw = json.dumps(completion(completion_tokens=6)).encode()
    events = [b'data: {"choices":[{"text":"b"}]}\n\n', b'data: {"choices":[],"usage":%s}\n\n', b"data: [DONE]\n\n"]
    events[1] %= json.dumps(completion()["usage"]).encode()
    engine = stub_vllm(Script([raw]))
    engine.script = lambda body: Script(events, media="text/event-stream") if body["stream"] else Script([raw])
    behind(engine, of_a_vllm, far_model)
    behind(stub_vllm(Script([raw]), owner="streamtap"), of_ours, far_model)


def test_what_a_far_vllm_would_answer_wrongly_it_is_not_asked(
    behind: Any, stub_vllm: Any, far_model: ModelConfig
) -> None:
    asked: list[tuple[dict[str, Any], str]] = [
        (CAPTURE | {"prompt": ["a", "b"]}, "unsupported"),
        (ASK | {"n": 2, "apply_steering_vectors": [VECTOR]}, "steering_unsupported"),
        (ASK | {"max_tokens": 1, "apply_steering_vectors": [SPANS]}, "steering_unsupported"),
        (ASK | {"max_tokens": 1, "apply_steering_vectors": [DEEP]}, "steering_unsupported"),
        (CAPTURE | {"prompt": "a" * 140, "output_positions": "last"}, "activation_prompt_too_long"),
    ]

    async def act(gateway: StubGateway, engine: Any) -> None:
        for body, code in asked:
            answer = await gateway.ask(body)
            assert (answer.status, answer.code) == (400, code)
        assert engine.bodies == []
        assert gateway.pool.failures == []
        assert all(quota["used"] == 0 for quota in gateway.usage["usage"].values())

    behind(stub_vllm(Script([b"{}"])), act, far_model)


def test_an_engine_that_does_not_say_what_it_is_fails(behind: Any, stub_vllm: Any, far_model: ModelConfig) -> None:
    async def act(gateway: StubGateway, engine: Any) -> None:
        engine._told = lambda _path: (500, b"")
        answer = await gateway.ask(CAPTURE)
        assert (answer.status, answer.code) == (502, "upstream_server_error")
        engine._told = lambda _path: (200, b"[]")
        assert (await gateway.ask(CAPTURE | {"prompt": ["a", "b"]})).code == "unsupported"

    behind(stub_vllm(Script([b"{}"])), act, far_model)
