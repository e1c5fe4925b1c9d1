from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from streamtap.completion import SteeringVector
from streamtap.engines.base import Completes
from streamtap.engines.worker import clients, completing
from streamtap.engines.worker.stages import Enter
from streamtap.errors import InvalidInput
from streamtap.testing.fake_completer import FakeCompleter
from streamtap.wire.reading import write_json
from streamtap.wire.steering import vector_body

CAPTURE = {"vllm_xargs": {"output_residual_stream": [1, 3]}}


def code_of(answer: Any) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"prompt": "tell-nobody', "bad_json"),
        (b'"tell-nobody"', "invalid_request"),
        (b'{"prompt": "tell-nobody", "max_tokens": 1, "tell": 1}', "invalid_request"),
        (b'{"prompt": "tell-nobody"}', "invalid_request"),
        (b'{"prompt": "tell-nobody", "max_tokens": 1, "model": "other"}', "model_not_found"),
        (b'{"prompt": "tell-nobody", "max_tokens": 3000}', "context_length_exceeded"),
        (b'{"prompt": [97], "max_tokens": 1}', "invalid_request"),
        (
            b'{"prompt": "tell-nobody", "max_tokens": 1, "vllm_xargs": {"output_residual_stream": [4]}}',
            "invalid_request",
        ),
        (
            b'{"prompt": "a", "max_tokens": 1, "stream": true, "vllm_xargs": {"output_residual_stream": [1]}}',
            "invalid_request",
        ),
    ],
)
def test_a_callers_mistake_is_a_400_and_never_runs(
    served: Any, body: bytes, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    answer = served.client.post("/v1/completions", content=body)

    assert code_of(answer) == (400, code)
    assert served.engine.requests == []
    assert "tell-nobody" not in answer.text + caplog.text
    assert served.is_idle


@pytest.mark.parametrize(
    ("fault", "said"), [("missing_layer", "lacks layer 3"), ("short", "expected [8, 8]"), ("nan", "not finite")]
)
@pytest.mark.parametrize("accept", ["application/json", "application/vnd.safetensors"])
def test_a_capture_that_is_not_whole_is_a_500_without_data(serve: Any, fault: Any, said: str, accept: str) -> None:
    with serve(FakeCompleter(fault=fault)) as served:
        answer = served.post(CAPTURE, headers={"Accept": accept})

    assert code_of(answer) == (500, "capture_failed")
    assert said in answer.json()["error"]["message"]
    assert answer.json()["error"]["layer"] in (1, 3)
    assert "activations" not in answer.text


def test_steering_out_of_range_is_the_callers_mistake(served: Any) -> None:
    vector = write_json([vector_body(SteeringVector((1,), np.ones((1, 8), np.float32), scale=1e39))]).decode()
    body = {"vllm_xargs": {"output_residual_stream": [1], "apply_steering_vectors": vector}}

    assert code_of(served.post(body)) == (400, "steering_not_finite")


@pytest.mark.parametrize(
    ("given", "status", "code"),
    [
        ({}, 401, "missing_authorization"),
        ({"Authorization": "Basic key-1"}, 401, "missing_authorization"),
        ({"Authorization": "Bearer"}, 401, "missing_authorization"),
        ({"Authorization": "Bearer key-2"}, 401, "invalid_api_key"),
        ({"Authorization": "Bearer key-1"}, 200, ""),
        ({"Authorization": "bearer key-1"}, 200, ""),
    ],
)
def test_a_worker_with_a_key_asks_for_it(
    serve: Any, given: dict[str, str], status: int, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with serve(FakeCompleter(), key="key-1") as served:
        answers = [served.post(headers=given), served.client.get("/v1/models", headers=given)]
        health = served.client.get("/health")

    assert [answer.status_code for answer in answers] == [status] * 2
    assert all(code in answer.text for answer in answers)
    assert health.status_code == 200
    assert "key-" not in caplog.text


def test_a_body_beyond_all_measure_is_refused(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "_MOST_BODY_BYTES", 1000)

    assert code_of(served.post({"prompt": "x" * 2000})) == (413, "request_too_large")
    assert served.post().status_code == 200


def test_other_addresses_and_methods(served: Any) -> None:
    assert code_of(served.client.get("/v1/completions")) == (405, "method_not_allowed")
    assert code_of(served.client.get("/v1/nothing")) == (404, "not_found")


def test_the_model_is_described(served: Any) -> None:
    assert served.client.get("/v1/models").json()["data"] == [
        {
            "id": "org/fake",
            "object": "model",
            "owned_by": "streamtap",
            "root": "fake",
            "max_model_len": 2048,
            "n_layers": 4,
            "hidden_size": 8,
            "vocabulary": 97,
            "dtype": "bfloat16",
        }
    ]


def test_nothing_is_taken_while_the_model_loads(serve: Any, wait_until: Any) -> None:
    may_go_on, engine = threading.Event(), FakeCompleter()

    def load(enter: Enter) -> Completes:
        enter("loading_weights")
        assert may_go_on.wait(10)
        return engine

    with serve(engine, load) as served:
        assert wait_until(lambda: served.worker.loading.stage == "loading_weights")
        health, refused = served.client.get("/health"), served.post()
        may_go_on.set()
        assert wait_until(lambda: served.client.get("/health").status_code == 200)
        ready = served.client.get("/health").json()

    assert health.status_code == 503
    assert health.json()["stage_label"] == "Loading the weights"
    assert 0 <= health.json()["stage_age_s"] < 10
    assert code_of(refused) == (503, "modal_cold_boot")
    assert (ready["stage"], ready["live"]) == ("ready", 0)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (InvalidInput("there is no such model."), "invalid_request", "there is no such model."),
        (RuntimeError("a library failed"), "internal_error", "loading failed: RuntimeError: a library failed"),
    ],
)
def test_health_says_why_the_model_did_not_load(
    serve: Any, wait_until: Any, error: Exception, code: str, said: str
) -> None:
    def load(_enter: Enter) -> Completes:
        raise error

    with serve(FakeCompleter(), load, failed_seconds=60) as served:
        assert wait_until(lambda: served.worker.loading.stage == "failed")
        answers = [served.client.get("/health"), served.client.get("/v1/models")]

    assert code_of(answers[0]) == (500, code)
    assert [answer.json()["error"]["message"] for answer in answers] == [said] * 2


def test_a_process_that_is_about_to_stop_says_so(served: Any) -> None:
    served.worker.is_closing = True

    assert code_of(served.post()) == (503, "server_restarting")


class BrokenEngine(FakeCompleter):
    """Fails in a way that no one thought of."""

    def submit(self, *_: Any) -> Any:
        raise ZeroDivisionError("tell-nobody")


def test_what_no_one_thought_of_is_a_500_that_tells_nothing(serve: Any, caplog: pytest.LogCaptureFixture) -> None:
    with serve(BrokenEngine()) as served:
        answer = served.post()

    assert code_of(answer) == (500, "internal_error")
    assert "tell-nobody" not in answer.text + caplog.text
    assert "ZeroDivisionError at test_refusals_of_a_worker.py" in caplog.text


def test_a_failure_after_the_first_byte_breaks_the_connection(
    served: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: Any, **__: Any) -> Iterator[bytes]:
        yield b'{"' + b"x" * (1 << 20)
        raise ZeroDivisionError("tell-nobody")

    monkeypatch.setattr(completing, "json_answer", failing)
    with served.connection(b'{"prompt": "hello", "max_tokens": 1}') as connection:
        connection.settimeout(10)
        received = b""
        while part := connection.recv(1 << 16):
            received += part

    assert received.startswith(b"HTTP/1.1 200 OK")
    assert b"transfer-encoding: chunked" in received
    assert not received.endswith(b"0\r\n\r\n")
    assert "ZeroDivisionError" in caplog.text
    assert "tell-nobody" not in caplog.text
    assert served.is_idle
