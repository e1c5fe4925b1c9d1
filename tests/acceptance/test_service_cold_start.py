"""Engines that take long to start, behind the real gateway."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx2
import openai
import pytest

pytestmark = pytest.mark.xdist_group("cold-start")  # which share a gateway

BODY = {"prompt": [0, 69, 70], "max_tokens": 3, "temperature": 0}
HASTY = {"first_answer_seconds": 0.2, "keepalive_seconds": 0.2}
PATIENT = {"first_answer_seconds": 60}
BINARY = "application/vnd.safetensors"


@pytest.fixture(scope="module")
def hasty(start_lasting_service: Any, fake: Any) -> Any:
    """A gateway that soon commits its status, over engines that take two seconds."""
    slow = ("--start-seconds", "2")
    models = [fake(name, *slow) for name in ("json", "capture", "events", "sdk", "sdk-events", "binary")]
    return start_lasting_service(*models, fake("broken", *slow, "--fail-start"), timing=HASTY, max_engines=8)


def _openai(service: Any) -> openai.OpenAI:
    # A client of the environment's proxies would not find this machine.
    return openai.OpenAI(base_url=service.base_url, api_key=service.key, timeout=300, max_retries=0)


def _lines(service: Any, **body: Any) -> list[str]:
    with service.client() as client, client.stream("POST", "/completions", json={**BODY, **body}) as answer:
        assert answer.status_code == 200
        return [line for line in answer.iter_lines() if line]


def _at_once(*asks: Any) -> list[Any]:
    """What each gives, all of them under way together: their engines start side by side."""
    found: list[Any] = [None] * len(asks)

    def run(place: int) -> None:
        found[place] = asks[place]()

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(asks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_every_client_waits_through_a_cold_start(hasty: Any) -> None:
    body, captured, lines, answer = _at_once(
        lambda: hasty.ask({"model": "json", **BODY}),
        lambda: hasty.ask({"model": "capture", **BODY, "output_residual_stream": [1, 2]}),
        lambda: _lines(hasty, model="events", stream=True),
        lambda: _openai(hasty).completions.create(model="sdk", **BODY),
    )

    text = body.json()["choices"][0]["text"]
    for response in (body, captured):
        start, brace, _ = response.text.partition("{")
        assert (response.status_code, brace) == (200, "{")
        assert len(start) > 2
        assert start.isspace()
    assert captured.json()["activations"]["residual_stream"]["shape"] == [2, 5, 8]
    first_data = next(place for place, line in enumerate(lines) if line.startswith("data:"))
    assert first_data > 2
    assert {line[0] for line in lines[:first_data]} == {":"}
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data:")]
    assert events.pop() == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == text
    assert answer.choices[0].text == text


def test_a_stream_of_the_sdk_waits_too_and_comments_are_no_chunks(hasty: Any) -> None:
    chunks = list(_openai(hasty).completions.create(model="sdk-events", **BODY, stream=True))

    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, "length"]


def test_a_start_that_fails_late_is_told_inside_the_200(hasty: Any) -> None:
    body, lines = _at_once(
        lambda: hasty.ask({"model": "broken", **BODY}), lambda: _lines(hasty, model="broken", stream=True)
    )

    assert body.status_code == 200
    assert body.text[0].isspace()
    error = body.json()["error"]
    assert (error["code"], error["retryable"]) == ("engine_dead", True)
    assert "Warming up" in error["message"]
    last = json.loads(lines[-1].removeprefix("data: "))
    assert last["error"]["code"] == "engine_dead"


def test_a_start_that_fails_soon_keeps_its_status(start_service: Any, fake: Any) -> None:
    service = start_service(fake("broken", "--fail-start", "--failed-seconds", "0.5"), timing=PATIENT)

    answers = [service.ask({**BODY, "stream": stream}) for stream in (False, True)]

    assert [answer.status_code for answer in answers] == [502, 502]
    assert {answer.json()["error"]["code"] for answer in answers} == {"engine_dead"}


def test_stages_are_seen_and_a_binary_answer_is_asked_to_come_back(hasty: Any, wait_until: Any) -> None:
    def boot() -> dict[str, Any]:
        with hasty.client() as client:
            found: dict[str, Any] = client.get("/models/binary/status").json()
            return found

    cold = boot()
    refused: httpx2.Response = hasty.ask({"model": "binary", **BODY, "output_residual_stream": True}, accept=BINARY)

    assert not cold["warm"]
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "modal_cold_boot")
    assert int(refused.headers["retry-after"]) == refused.json()["error"]["retry_after_seconds"]
    stages = {boot()["activation_boot"]["stage"]}
    # The engine goes on starting though nobody waits.
    assert wait_until(lambda: stages.add(boot()["activation_boot"]["stage"]) or "ready" in stages)
    assert stages & {"starting", "loading_weights", "warming_up"}
    binary: httpx2.Response = hasty.ask({"model": "binary", **BODY, "output_residual_stream": True}, accept=BINARY)
    assert binary.headers["content-type"] == BINARY
