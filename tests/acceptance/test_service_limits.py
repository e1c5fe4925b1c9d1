"""Limits of one key under many requests at once, over real connections; with two gateways on one PostgreSQL."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import httpx2
import pytest

PROMPT = [0, 69, 70]
CAPTURE = {"prompt": PROMPT, "max_tokens": 1, "output_residual_stream": [1]}
#: Far longer than any test waits.
ENDLESS = {"prompt": PROMPT, "max_tokens": 1500, "stream": True}


async def _begin(client: httpx2.AsyncClient, body: dict[str, Any]) -> None:
    async with client.stream("POST", "/completions", json=body) as answer:
        async for _ in answer.aiter_bytes():
            pass


async def _until(service: Any, key: str, requests: tuple[int, int]) -> None:
    async with asyncio.timeout(60):
        async with service.client(key, asynchronous=True) as client:
            while True:
                now = (await client.get("/usage")).json()["requests"]
                if (now["active"]["now"], now["waiting"]["now"]) == requests:
                    return
                await asyncio.sleep(0.1)


def test_the_81st_request_of_a_key_is_refused_and_those_that_leave_make_room(start_service: Any, fake: Any) -> None:
    service = start_service(fake("fake", "--token-seconds", "0.1"))

    async def main() -> None:
        async with (
            service.client(asynchronous=True) as many,
            service.client(asynchronous=True) as one,
            service.client(service.new_key("other"), asynchronous=True) as other,
        ):
            tasks = [asyncio.create_task(_begin(many, ENDLESS)) for _ in range(80)]
            await _until(service, service.key, (16, 64))

            refused = await one.post("/completions", json={"prompt": PROMPT, "max_tokens": 1})
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
            assert refused.headers["retry-after"] == "5"
            assert (await other.post("/completions", json=CAPTURE)).status_code == 200

            tasks[0].cancel()
            await _until(service, service.key, (16, 63))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await _until(service, service.key, (0, 0))
            assert (await one.post("/completions", json=CAPTURE)).status_code == 200

    asyncio.run(main())


async def _fifty(services: list[Any], key: str) -> list[httpx2.Response]:
    clients = [service.client(key, asynchronous=True) for service in services]
    try:
        asked = [clients[number % len(clients)].post("/completions", json=CAPTURE) for number in range(50)]
        return await asyncio.gather(*asked)
    finally:
        for client in clients:
            await client.aclose()


@pytest.mark.parametrize("kind", ["sqlite", "two gateways on postgresql"])
def test_of_fifty_at_once_on_a_quota_of_ten_exactly_ten_pass(
    kind: str, start_service: Any, fake: Any, request: pytest.FixtureRequest
) -> None:
    if kind == "sqlite":
        services = [start_service(fake())]
    else:
        address = request.getfixturevalue("postgres").new_database()
        services = [start_service(fake(), database=address) for _ in range(2)]
    key = services[0].new_key("small", monthly_activations=10)
    for service in services:
        assert service.ask({**CAPTURE, "max_tokens": 1}).status_code == 200

    answers = asyncio.run(_fifty(services, key))

    assert Counter(_said(answer) for answer in answers) == {"an answer": 10, "activation_quota_exceeded": 40}
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert "10/10" in refused.json()["error"]["message"]
    for service in services:
        assert service.until_idle(key)
        assert service.usage(key)["usage"]["monthly_activations"]["used"] == 10


def _said(answer: httpx2.Response) -> str:
    body = answer.json()
    return "an answer" if body.get("activations") else str(body["error"]["code"])


def test_a_stream_that_is_dropped_frees_its_slot_and_pays_for_what_it_got(start_service: Any, fake: Any) -> None:
    service = start_service(fake("fake", "--token-seconds", "0.05"))
    key = service.new_key("narrow", max_active=1, max_waiting=0)

    with service.client(key) as client:
        with client.stream("POST", "/completions", json=ENDLESS) as answer:
            lines = answer.iter_lines()
            got = [next(lines) for _ in range(5)]
            assert client.post("/completions", json=CAPTURE).json()["error"]["code"] == "queue_full"
        assert service.until_idle(key)
        used = service.usage(key)["usage"]["monthly_output_tokens"]["used"]
        assert client.post("/completions", json=CAPTURE).status_code == 200

    assert any(line.startswith("data:") for line in got)
    assert 0 < used < 500
