"""Every refusal of a completion: its status and code, the engine never called, no quota used."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from streamtap.server.config import Limits, ModelConfig
from streamtap.server.ledger.keys import KeyLimits
from streamtap.testing.stub_engine import StubPool
from streamtap.testing.stub_gateway import CONTEXT, Answer, StubGateway

GOOD = {"model": "stub", "prompt": "ab", "max_tokens": 1}
VECTOR = {
    "activations": {
        "data": "AAAAAAAAAAAAAAAAAAAAAA==",
        "dtype": "int16",
        "original_dtype": "torch.bfloat16",
        "shape": [1, 8],
        "compression": None,
    },
    "layer_indices": [1],
}

BODIES: dict[str, tuple[Any, str]] = {
    "not json": (b"{", "bad_json"),
    "nothing": (b"", "bad_json"),
    "nan": (b'{"prompt": "a", "temperature": NaN}', "bad_json"),
    "broken utf-8": (b'{"prompt": "\xff"}', "bad_json"),
    "half a surrogate pair": (b'{"prompt": "\\ud800"}', "bad_json"),
    "a list": ([], "invalid_request"),
    "no prompt": ({"max_tokens": 1}, "invalid_request"),
    "unknown field": (GOOD | {"best_of": 2}, "invalid_request"),
    "empty list of prompts": (GOOD | {"prompt": []}, "invalid_request"),
    "mixed prompts": (GOOD | {"prompt": ["a", [1]]}, "invalid_request"),
    "boolean ids": (GOOD | {"prompt": [True]}, "invalid_request"),
    "id outside the vocabulary": (GOOD | {"prompt": [97]}, "invalid_request"),
    "too many prompts": (GOOD | {"prompt": ["a"] * 9}, "invalid_request"),
    "prompt of no token": (GOOD | {"prompt": "", "add_special_tokens": False}, "invalid_request"),
    "temperature": (GOOD | {"temperature": -1}, "invalid_request"),
    "n": (GOOD | {"n": 17}, "invalid_request"),
    "max_tokens 0 for nothing": (GOOD | {"max_tokens": 0}, "invalid_request"),
    "no max_tokens for two prompts": ({"prompt": ["a", "b"]}, "invalid_request"),
    "too much work": (GOOD | {"n": 16, "max_tokens": 2001}, "invalid_request"),
    "unknown model": (GOOD | {"model": "gpt-4"}, "model_not_found"),
    "no activation engine, capture": (
        GOOD | {"model": "mute", "output_residual_stream": True},
        "activations_unsupported",
    ),
    "no activation engine, steering": (
        GOOD | {"model": "mute", "apply_steering_vectors": [VECTOR]},
        "activations_unsupported",
    ),
    "no layers": (GOOD | {"output_residual_stream": []}, "invalid_request"),
    "negative layer": (GOOD | {"output_residual_stream": [-1]}, "invalid_request"),
    "layer out of range": (GOOD | {"output_residual_stream": [4]}, "invalid_request"),
    "steered layer out of range": (
        GOOD | {"apply_steering_vectors": [VECTOR | {"layer_indices": [4]}]},
        "invalid_request",
    ),
    "capture with stream": (GOOD | {"output_residual_stream": True, "stream": True}, "invalid_request"),
    "capture with n": (GOOD | {"output_residual_stream": True, "n": 2}, "invalid_request"),
    "context": (GOOD | {"prompt": "a" * CONTEXT}, "context_length_exceeded"),
    "context, max_tokens": (GOOD | {"max_tokens": CONTEXT - 2}, "context_length_exceeded"),
    "context, no max_tokens": ({"prompt": "a" * CONTEXT}, "context_length_exceeded"),
    "whole vocabulary": (GOOD | {"prompt": "a" * 1024, "prompt_logprobs": -1}, "full_vocab_prompt_too_long"),
    "whole vocabulary of two": (
        GOOD | {"prompt": ["a" * 600, "b" * 600], "prompt_logprobs": -1, "max_tokens": 1},
        "full_vocab_prompt_too_long",
    ),
    "capture cap": (GOOD | {"prompt": "a" * 64, "output_residual_stream": True}, "activation_prompt_too_long"),
    "capture cap, generated": (GOOD | {"max_tokens": 63, "output_residual_stream": True}, "activation_prompt_too_long"),
    "capture cap, batch": (
        GOOD | {"prompt": ["a" * 31, "b" * 32], "output_residual_stream": True},
        "activation_prompt_too_long",
    ),
    "steered position out of range": (
        GOOD | {"apply_steering_vectors": [VECTOR | {"position_spans": [[50, 60]]}]},
        "invalid_request",
    ),
    "position out of range": (GOOD | {"output_residual_stream": [0], "output_positions": [3]}, "invalid_request"),
}


def _gateway(folder: Path, **more: Any) -> StubGateway:
    return StubGateway(folder, StubPool(), limits=Limits(max_prompts=8, max_body_bytes=65_536), **more)


def _check_untouched(gateway: StubGateway) -> None:
    assert gateway.pool.leases == []
    assert all(quota["used"] == 0 for quota in gateway.usage["usage"].values())
    assert gateway.usage["requests"]["active"]["now"] == 0


def _check_shape(answer: Answer, code: str) -> None:
    error = answer.json["error"]
    assert error["code"] == code
    assert {"message", "type", "code", "retryable"} <= set(error)
    assert answer.json["request_id"] == answer.headers["x-request-id"]
    if error["retryable"]:
        assert int(answer.headers["retry-after"]) == error["retry_after_seconds"] > 0


@pytest.mark.parametrize("name", BODIES)
def test_a_wrong_body_is_refused_before_any_engine_hears_of_it(name: str, tmp_path: Path) -> None:
    body, code = BODIES[name]

    async def main() -> None:
        gateway = _gateway(tmp_path)
        answer = await gateway.ask(body)

        assert answer.status == 400, answer.body
        _check_shape(answer, code)
        _check_untouched(gateway)
        await gateway.close()

    asyncio.run(main())


def test_keys_that_are_not_taken(tmp_path: Path) -> None:
    async def main() -> None:
        gateway = _gateway(tmp_path)
        harvests = gateway.keys.create("harvests", scopes=["harvest"]).secret
        paused, revoked = gateway.keys.create("paused").secret, gateway.keys.create("revoked").secret
        gateway.keys.pause("paused")
        gateway.keys.revoke("revoked")
        expected = {
            None: (401, "missing_authorization"),
            "stp_nobody": (401, "invalid_api_key"),
            paused: (401, "key_disabled"),
            revoked: (401, "key_revoked"),
            harvests: (403, "scope_denied"),
        }

        for key, (status, code) in expected.items():
            answer = await gateway.ask(GOOD, key=key)
            assert answer.status == status
            _check_shape(answer, code)
            assert key is None or key.encode() not in answer.body
        assert (await gateway.ask(GOOD, key=None, authorization="Basic abc")).code == "missing_authorization"
        _check_untouched(gateway)
        await gateway.close()

    asyncio.run(main())


def test_a_body_that_is_too_large_however_it_is_sent(tmp_path: Path) -> None:
    async def main() -> None:
        gateway = _gateway(tmp_path)

        for headers in ({"content_length": "65537"}, {"content_length": "9" * 5000}):
            answer = await gateway.ask(b"{}", **headers)
            assert answer.status == 413
            _check_shape(answer, "request_too_large")
        chunked = await gateway.ask(b" " * 65_537)
        assert (chunked.status, chunked.code) == (413, "request_too_large")
        _check_untouched(gateway)
        await gateway.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("limits", "body", "code"),
    [
        (KeyLimits(rate_per_minute=1), GOOD, "rate_limited"),
        (KeyLimits(monthly_activations=1), GOOD | {"output_residual_stream": True}, "activation_quota_exceeded"),
        (KeyLimits(monthly_input_tokens=3), GOOD, "budget_exceeded"),
        (KeyLimits(daily_output_tokens=1), GOOD, "budget_exceeded"),
    ],
)
def test_limits_of_a_key(limits: KeyLimits, body: dict[str, Any], code: str, tmp_path: Path) -> None:
    async def main() -> None:
        gateway = _gateway(tmp_path, key_limits=limits)
        ticket = gateway.ledger.admit(gateway.key, scope="completions", endpoint="/", request_id="one")
        gateway.ledger.reserve(ticket, model="stub", input_tokens=2, output_tokens=1, activations=1)
        before = gateway.usage["usage"]

        answer = await gateway.ask(body)

        assert answer.status == 429
        _check_shape(answer, code)
        assert gateway.usage["usage"] == before
        assert gateway.pool.leases == []
        await gateway.close()

    asyncio.run(main())


def test_a_key_with_everything_it_may_have_running_and_waiting(tmp_path: Path) -> None:
    async def main() -> None:
        gateway = _gateway(tmp_path, key_limits=KeyLimits(max_active=2, max_waiting=1))
        for number in range(3):
            gateway.ledger.admit(gateway.key, scope="completions", endpoint="/", request_id=str(number))

        answer = await gateway.ask(GOOD)

        assert (answer.status, answer.headers["retry-after"]) == (429, "5")
        _check_shape(answer, "queue_full")
        await gateway.close()

    asyncio.run(main())


def test_the_first_check_that_fails_is_the_one_that_is_told(tmp_path: Path) -> None:
    """The contract's order: rate limit and key before the body, then JSON, schema, model, support, layers, quota, …."""
    captures = {"output_residual_stream": True}
    wrong_in_two_ways = [
        (GOOD | {"n": 0, "model": "gpt-4"}, "invalid_request"),
        (GOOD | {"model": "gpt-4", "output_residual_stream": [99]}, "model_not_found"),
        (GOOD | {"model": "mute", "output_residual_stream": [99]}, "activations_unsupported"),
        (GOOD | {"output_residual_stream": [99], "prompt": "a" * CONTEXT}, "invalid_request"),
        (GOOD | captures | {"prompt": "a" * CONTEXT}, "activation_quota_exceeded"),
        (GOOD | {"prompt": "a" * CONTEXT, "prompt_logprobs": -1}, "context_length_exceeded"),
        (GOOD | {"n": 16, "max_tokens": CONTEXT - 2}, "context_length_exceeded"),
    ]

    async def main() -> None:
        gateway = _gateway(tmp_path, key_limits=KeyLimits(monthly_activations=1))
        ticket = gateway.ledger.admit(gateway.key, scope="completions", endpoint="/", request_id="one")
        gateway.ledger.reserve(ticket, model="stub", input_tokens=2, output_tokens=1, activations=1)

        assert (await gateway.ask(b"{", key="stp_nobody")).code == "invalid_api_key"
        for body, code in wrong_in_two_ways:
            assert (await gateway.ask(body)).code == code
        assert gateway.pool.leases == []
        await gateway.close()

    asyncio.run(main())


def test_the_cap_of_a_capture_is_told_with_what_was_counted(tmp_path: Path) -> None:
    async def main() -> None:
        gateway = _gateway(tmp_path)
        ask = {"prompt": "a" * 200, "max_tokens": 10}

        one_layer = await gateway.ask(ask | {"output_residual_stream": [3], "prompt": "a" * 256})
        three_layers = await gateway.ask(ask | {"output_residual_stream": [0, 1, 3]})

        # 64 of all 4 layers: 256 of one, 85 of three; 256 or 200 letters, a BOS and the 9 tokens that are fed back.
        assert "266 positions" in one_layer.json["error"]["message"]
        assert "at most 256" in one_layer.json["error"]["message"]
        assert "210 positions" in three_layers.json["error"]["message"]
        assert "at most 85" in three_layers.json["error"]["message"]
        await gateway.close()

    asyncio.run(main())


def test_a_cap_never_passes_the_context(tmp_path: Path) -> None:
    async def main() -> None:
        wide = ModelConfig(id="wide", checkpoint="org/wide", max_activation_prompt_tokens=1000)
        gateway = _gateway(tmp_path, models=[wide])

        batch = {"prompt": ["a" * 1200, "b" * 1200], "output_residual_stream": [0]}

        assert "at most 2048" in (await gateway.ask(batch)).json["error"]["message"]
        await gateway.close()

    asyncio.run(main())


def test_what_a_vllm_would_answer_wrongly_is_never_asked_of_it(tmp_path: Path) -> None:
    async def main() -> None:
        gateway = _gateway(tmp_path, models=[ModelConfig(id="vllm", checkpoint="org/vllm", engine="vllm")])

        batch = await gateway.ask({"prompt": ["a", "b"], "output_residual_stream": True})
        samples = await gateway.ask({"prompt": "a", "n": 2, "max_tokens": 1, "apply_steering_vectors": [VECTOR]})

        assert (batch.status, batch.code) == (400, "unsupported")
        assert (samples.status, samples.code) == (400, "steering_unsupported")
        _check_untouched(gateway)
        await gateway.close()

    asyncio.run(main())


def test_chat_completions_are_refused_without_a_key(tmp_path: Path) -> None:
    async def main() -> None:
        gateway = _gateway(tmp_path)

        answer = await gateway.get("/v1/chat/completions", method="POST", key=None)

        assert answer.status == 400
        _check_shape(answer, "chat_completions_unsupported")
        await gateway.close()

    asyncio.run(main())
