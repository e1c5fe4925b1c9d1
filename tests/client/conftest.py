"""Both clients as one, and a small server behind them: the real bodies over a fake model."""

from __future__ import annotations

import asyncio
import json
import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx2
import pytest

from streamtap.client.aio import AsyncClient
from streamtap.client.retrying import PATIENT, Retries
from streamtap.client.sync import Client
from streamtap.completion import Delta, Event, Failed, Finished
from streamtap.errors import StreamtapError
from streamtap.testing.fake_completer import FakeCompleter
from streamtap.wire import sse
from streamtap.wire.answers import json_answer
from streamtap.wire.errors import error_body
from streamtap.wire.requests import read_body
from streamtap.wire.safetensors_body import MEDIA_TYPE, safetensors_answer

Handler = Callable[[httpx2.Request], httpx2.Response]
HEAD: dict[str, Any] = {"id": "cmpl-1", "created": 0, "model": "org/checkpoint"}
KEY = "stp_abcdefgh_secret"


@dataclass
class Asker:
    """Makes a client, plain or async, asks it one thing, and closes it; ``waits`` are the seconds it slept."""

    is_async: bool
    waits: list[float] = field(default_factory=list)

    def __call__(
        self, handler: Handler, method: str, *arguments: Any, retries: Retries | None = PATIENT, **options: Any
    ) -> Any:
        transport = httpx2.MockTransport(handler)
        if self.is_async:
            return asyncio.run(self._awaited(transport, method, arguments, retries, options))
        with Client("http://server/v1", KEY, transport=transport, retries=retries, sleep=self.waits.append) as client:
            found = getattr(client, method)(*arguments, **options)
            return (list(found), found.usage) if method == "stream" else found

    async def _awaited(
        self, transport: httpx2.MockTransport, method: str, arguments: Any, retries: Retries | None, options: Any
    ) -> Any:
        async def sleep(seconds: float) -> None:
            self.waits.append(seconds)

        async with AsyncClient("http://server/v1", KEY, transport=transport, retries=retries, sleep=sleep) as client:
            found = getattr(client, method)(*arguments, **options)
            if method == "stream":
                return [delta async for delta in found], found.usage
            return await found


@pytest.fixture(params=["plain", "async"])
def ask(request: pytest.FixtureRequest) -> Asker:
    return Asker(request.param == "async")


class Service:
    """Answers requests as the gateway does, from a model of four layers and width 8; ``asked`` are their bodies."""

    def __init__(self) -> None:
        self.engine = FakeCompleter(dtype="float32")
        self.asked: list[dict[str, Any]] = []

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        assert request.url.path == "/v1/completions", request.url.path
        assert request.headers["authorization"] == f"Bearer {KEY}"
        self.asked.append(json.loads(request.content))
        try:
            body = read_body(request.content)
            events = list(self.events(body.to_request(max_tokens=body.max_tokens or 1, n_layers=4, hidden=8)))
        except StreamtapError as error:
            return httpx2.Response(400, content=error_body(error, "r"), headers={"content-type": "application/json"})
        if body.stream:
            return self._streamed(events)
        finished = events[-1]
        assert isinstance(finished, Finished)
        if MEDIA_TYPE in request.headers["accept"]:
            _, pieces = safetensors_answer(finished, **HEAD)
            return httpx2.Response(200, content=b"".join(pieces), headers={"content-type": MEDIA_TYPE})
        content = b"".join(json_answer(finished, **HEAD))
        return httpx2.Response(200, content=content, headers={"content-type": "application/json"})

    def events(self, asked: Any) -> Iterator[Event]:
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.engine.submit(asked, events.put)
        while True:
            event = events.get(timeout=20)
            if isinstance(event, Failed):
                raise event.error
            yield event
            if isinstance(event, Finished):
                return

    def _streamed(self, events: list[Event]) -> httpx2.Response:
        chunks = [sse.chunk_event(event, include_usage=True, **HEAD) for event in events if isinstance(event, Delta)]
        finished = events[-1]
        assert isinstance(finished, Finished)
        ends = [sse.usage_event(finished.usage, **HEAD), sse.DONE]
        content = sse.KEEPALIVE + b"".join([*chunks, *ends])
        return httpx2.Response(200, content=content, headers={"content-type": f"{sse.MEDIA_TYPE}; charset=utf-8"})


@pytest.fixture
def service() -> Service:
    return Service()
