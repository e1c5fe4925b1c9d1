"""The other addresses, and what every answer has."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

import streamtap
from streamtap.server.config import ModelConfig
from streamtap.testing.stub_engine import StubPool
from streamtap.testing.stub_gateway import StubGateway

AS_WE_RUN_IT = {"engine": "transformers", "own_arguments": False}
OF_ACTIVATIONS = {"max_activation_prompt_tokens", "max_harvest_prompts", "output_positions", "output_dtypes"}


def _run(folder: Path, act: Callable[[StubGateway], Coroutine[Any, Any, None]], **more: Any) -> None:
    async def main() -> None:
        gateway = StubGateway(folder, StubPool(), **more)
        await act(gateway)
        await gateway.close()

    asyncio.run(main())


def test_every_answer_has_an_id_and_a_plain_one_of_the_caller_is_kept(tmp_path: Path) -> None:
    async def act(gateway: StubGateway) -> None:
        for path in ("/health", "/nothing", "/v1/models", "/v1/completions", "/openapi.json", "/docs", "/metrics"):
            assert (await gateway.get(path, x_request_id="abc_-9")).headers["x-request-id"] == "abc_-9"
        for unfit in ("", "a b", "a" * 65, "ä", "a\n"):
            assert (await gateway.get("/health", x_request_id=unfit)).headers["x-request-id"].startswith("req_")

    _run(tmp_path, act)


def test_addresses_and_methods_that_nobody_serves(tmp_path: Path) -> None:
    async def act(gateway: StubGateway) -> None:
        expected = {
            ("GET", "/"): (404, "not_found"),
            ("GET", "/v1/models/"): (404, "not_found"),
            ("POST", "/v1/harvest/x/y"): (404, "not_found"),
            ("POST", "/v1/harvest/x"): (405, "method_not_allowed"),
            ("DELETE", "/v1/harvest"): (405, "method_not_allowed"),
            ("GET", "/v1/completions"): (405, "method_not_allowed"),
            ("DELETE", "/v1/models"): (405, "method_not_allowed"),
            ("GET", "/v1/chat/completions"): (405, "method_not_allowed"),
        }
        for (method, path), (status, code) in expected.items():
            answer = await gateway.get(path, method=method, key=None)
            assert (answer.status, answer.code) == (status, code)
            assert answer.json["request_id"] == answer.headers["x-request-id"]
            assert status != 405 or answer.headers["allow"]

    _run(tmp_path, act)


def test_models_say_what_they_can_do_and_nothing_that_is_unknown(tmp_path: Path) -> None:
    async def act(gateway: StubGateway) -> None:
        listed = (await gateway.get("/v1/models")).json
        assert listed["object"] == "list"
        able, mute = listed["data"]
        assert able == AS_WE_RUN_IT | {
            "id": "stub",
            "object": "model",
            "owned_by": "streamtap",
            "served_model_name": "org/stub",
            "status": "warm",
            "capabilities": {
                "max_model_len": 2048,
                "max_logprobs": 100,
                "max_output_work_tokens": 32000,
                "least_max_tokens": 0,
                "max_inflight_per_key": 16,
                "max_queued_per_key": 64,
                "rate_limit_per_minute": 600,
                "logprobs": True,
                "prompt_logprobs": True,
                "prompt_logprobs_full_vocab": True,
                "full_vocab_max_prompt_tokens": 1024,
                "activations": True,
                "max_steering_vectors": 8,
                "max_activation_prompt_tokens": 64,
                "output_positions": True,
                "output_dtypes": ["bfloat16", "float32"],
                "harvest": True,
                "max_harvest_prompts": 4096,
                "max_harvest_tokens": 2000000,
                "n_layers": 4,
                "hidden_size": 8,
                "dtype": "float32",
            },
        }
        assert mute["capabilities"]["activations"] is False
        assert mute["capabilities"]["harvest"] is False
        assert OF_ACTIVATIONS.isdisjoint(mute["capabilities"])

    _run(tmp_path, act)


def test_whether_a_model_is_warm(tmp_path: Path) -> None:
    boot = {"stage": "ready", "stage_label": "ready", "stage_age_s": 0.0}

    async def act(gateway: StubGateway) -> None:
        assert (await gateway.get("/v1/models/stub/status")).json == {
            "warm": True,
            "boot": boot,
            "activation_boot": boot,
        }
        assert "activation_boot" not in (await gateway.get("/v1/models/mute/status")).json
        unknown = await gateway.get("/v1/models/gpt-4/status")
        assert (unknown.status, unknown.code) == (400, "model_not_found")
        assert "stub, mute" in unknown.json["error"]["message"]

    _run(tmp_path, act)


def test_any_key_reads_and_none_does_not(tmp_path: Path) -> None:
    async def act(gateway: StubGateway) -> None:
        harvester = gateway.keys.create("harvester", scopes=["harvest"]).secret
        gateway.keys.create("paused")
        for path in ("/v1/models", "/v1/models/stub/status", "/v1/usage"):
            assert (await gateway.get(path, key=harvester)).status == 200
            assert (await gateway.get(path, key=None)).code == "missing_authorization"
            refused = await gateway.get(path, key="stp_wrong")
            assert (refused.status, refused.headers["www-authenticate"]) == (401, "Bearer")
        assert (await gateway.get("/v1/usage", key=harvester)).json["name"] == "harvester"

    _run(tmp_path, act)


def test_health_and_metrics_need_no_key(tmp_path: Path) -> None:
    async def act(gateway: StubGateway) -> None:
        health = await gateway.get("/health", key=None)
        assert health.json["status"] == "ok"
        assert health.json["version"] == streamtap.__version__
        await gateway.get("/secret-path-of-mine", key=None)
        await gateway.ask({"model": "nope", "prompt": "a", "max_tokens": 1})

        metrics = await gateway.get("/metrics", key=None)

        assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
        lines = metrics.body.decode()
        assert (
            'streamtap_requests_total{code="model_not_found",endpoint="/v1/completions",model="",status="400"} 1.0'
            in lines
        )
        assert 'streamtap_engine_state{model="stub",role="completions",state="ready"} 1.0' in lines
        assert "secret-path" not in lines

    _run(tmp_path, act)


def test_the_schema_names_every_address_and_the_body(tmp_path: Path) -> None:
    async def act(gateway: StubGateway) -> None:
        schema = (await gateway.get("/openapi.json", key=None)).json
        assert set(schema["paths"]) == {
            "/v1/completions",
            "/v1/chat/completions",
            "/v1/models",
            "/v1/models/{model_id}/status",
            "/v1/usage",
            "/v1/harvest",
            "/v1/harvest/{job_id}",
            "/v1/harvest/files/{run_id}/{name}",
            "/health",
            "/metrics",
        }
        assert "project_onto" in schema["components"]["schemas"]["HarvestBody"]["properties"]
        assert "output_residual_stream" in schema["components"]["schemas"]["CompletionBody"]["properties"]
        text = json.dumps(schema)
        named = {part.partition('"')[0] for part in text.split("#/components/schemas/")[1:]}
        assert named <= set(schema["components"]["schemas"])

    _run(tmp_path, act)


def test_the_default_model_serves_a_request_that_names_none(tmp_path: Path) -> None:
    async def act(gateway: StubGateway) -> None:
        await gateway.ask({"prompt": "a", "max_tokens": 1})
        assert gateway.pool.leases == [("first", "completions")]

    _run(tmp_path, act, models=[ModelConfig(id="first", checkpoint="a"), ModelConfig(id="second", checkpoint="b")])


def test_a_fault_of_ours_is_a_500_that_says_nothing_of_the_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def act(gateway: StubGateway) -> None:
        def fails(*_given: Any, **_named: Any) -> None:
            raise RuntimeError("a secret prompt")

        gateway.pool.boot = fails  # type: ignore[method-assign,assignment]
        gateway.pool.lease = fails  # type: ignore[method-assign,assignment]
        for answer in (
            await gateway.get("/v1/models/stub/status"),
            await gateway.ask({"prompt": "a", "max_tokens": 1}),
        ):
            assert (answer.status, answer.code) == (500, "internal_error")
            assert b"secret" not in answer.body
        assert gateway.usage["requests"]["active"]["now"] == 0
        assert gateway.usage["usage"]["monthly_input_tokens"]["used"] == 0

    with caplog.at_level("INFO", logger="streamtap"):
        _run(tmp_path, act)
    faults = [record for record in caplog.records if record.getMessage() == "fault"]
    assert [fault.streamtap_fields["error"] for fault in faults] == ["RuntimeError"] * 2  # type: ignore[attr-defined]
    assert "secret" not in str([vars(record) for record in caplog.records])
