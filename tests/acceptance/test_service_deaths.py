"""`kill -9` of an engine and of the gateway, in the middle of requests."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import httpx2
import pytest

PROMPT = [0, 69, 70]
#: Ten seconds and more, if nobody ends it.
LONG = {"prompt": PROMPT, "max_tokens": 100, "temperature": 0}
SHORT = {"prompt": PROMPT, "max_tokens": 1}
PATIENT = {"first_answer_seconds": 60}


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class _Asking(threading.Thread):
    """One request under way; ``outcome`` is its answer, or how the connection broke."""

    def __init__(self, service: Any, body: dict[str, Any]) -> None:
        super().__init__()
        self._service, self._body = service, body
        self.outcome: httpx2.Response | httpx2.HTTPError | None = None
        self.start()

    def run(self) -> None:
        try:
            self.outcome = self._service.ask(self._body)
        except httpx2.HTTPError as error:
            self.outcome = error


def _are_running(service: Any, n_requests: int) -> bool:
    return bool(service.usage()["requests"]["active"]["now"] == n_requests)


def _used(service: Any, what: str) -> int:
    return int(service.usage()["usage"][what]["used"])


@pytest.mark.parametrize("more", [{}, {"output_residual_stream": [1]}], ids=["plain", "capture"])
def test_an_engine_that_is_killed_fails_its_requests_and_the_next_one_works(
    more: dict[str, Any], start_service: Any, fake: Any, wait_until: Any
) -> None:
    service = start_service(fake("fake", "--token-seconds", "0.1"), timing=PATIENT)
    assert service.ask({**SHORT, **more}).status_code == 200
    used = service.usage()["usage"]
    asking = [_Asking(service, {**LONG, **more}) for _ in range(2)]
    assert wait_until(lambda: _are_running(service, 2))
    # What lasts is counted a moment after the engine was asked.
    assert wait_until(
        lambda: _used(service, "monthly_input_tokens") == used["monthly_input_tokens"]["used"] + 2 * len(PROMPT)
    )

    (engine,) = service.engines()
    os.kill(engine, signal.SIGKILL)
    for each in asking:
        each.join()

    for each in asking:
        assert isinstance(each.outcome, httpx2.Response)
        error = each.outcome.json()["error"]
        assert (each.outcome.status_code, error["code"], error["retryable"]) == (502, "engine_dead", True)
    # The server's fault costs nothing.
    assert service.usage()["usage"] == used
    assert service.ask({**SHORT, **more}).status_code == 200
    assert service.engines() != [engine]


def test_a_stream_whose_engine_is_killed_ends_with_the_error(start_service: Any, fake: Any) -> None:
    service = start_service(fake("fake", "--token-seconds", "0.1"), timing=PATIENT)

    with (
        service.client() as client,
        client.stream("POST", "/completions", json={**LONG, "stream": True}) as answer,
    ):
        lines = answer.iter_lines()
        first = next(lines)
        (engine,) = service.engines()
        os.kill(engine, signal.SIGKILL)
        rest = [line for line in lines if line.startswith("data:")]

    assert '"choices"' in first
    assert '"engine_dead"' in rest[-1]
    assert "[DONE]" not in rest


def test_a_gateway_that_is_killed_leaves_no_engine_and_no_debt(start_service: Any, fake: Any, wait_until: Any) -> None:
    service = start_service(fake("fake", "--token-seconds", "0.1"), timing=PATIENT)
    capture = {"output_residual_stream": [1]}
    for body in (SHORT, {**SHORT, **capture}):
        assert service.ask(body).status_code == 200
    before = service.usage()
    asking = [_Asking(service, {**LONG, **more}) for more in ({}, capture, {"stream": True})]
    assert wait_until(lambda: _are_running(service, 3))
    assert wait_until(lambda: _used(service, "monthly_activations") == 2)
    engines = service.engines()

    service.kill()
    for each in asking:
        each.join()

    assert len(engines) == 2
    assert wait_until(lambda: not any(map(_is_running, engines)))
    service.start()
    after = service.usage()
    assert after["requests"] == before["requests"]
    assert after["usage"] == before["usage"]
    assert service.ask({**SHORT, **capture}).status_code == 200
    assert _used(service, "monthly_activations") == 2
