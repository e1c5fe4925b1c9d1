"""Both clients as one, and a small server behind them: the real bodies over a fake model."""

from __future__ import annotations

import asyncio
import inspect
import json
import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from streamtap.client.aio import AsyncClient
from streamtap.client.retrying import PATIENT, Retries
from streamtap.client.sync import Client
from streamtap.completion import Delta, Event, Failed, Finished
from streamtap.errors import StreamtapError
from streamtap.testing.fake_completer import FakeCompleter
from streamtap.testing.stub_harvests import StubHarvests
from streamtap.wire import sse
from streamtap.wire.answers import json_answer
from streamtap.wire.errors import error_body
from streamtap.wire.requests import read_body
from streamtap.wire.safetensors_body import MEDIA_TYPE, safetensors_answer

Handler = Callable[[httpx2.Request], httpx2.Response]
HEAD: dict[str, Any] = {"id": "cmpl-1", "created": 0, "model": "org/checkpoint"}
KEY = "stp_abcdefgh_secret"
HARVEST_PROMPTS = [f"prompt {i}" + " and more" * (i % 3) for i in range(10)]


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


class HarvestClock:
    """Time that passes when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    async def sleep_awaiting(self, seconds: float) -> None:
        self.sleep(seconds)


class HarvestUser:
    """One client, plain or async, and whatever its calls give, awaited where that is needed."""

    def __init__(self, stub: StubHarvests, is_async: bool, runner: asyncio.Runner) -> None:
        self.stub, self.clock, self._runner = stub, HarvestClock(), runner
        self.fails: list[Exception] = []
        self.waited_out: list[Exception] = []
        transport = httpx2.MockTransport(self._handle)
        retries = Retries(now=lambda: self.clock.now, waiting=self.waited_out.append)
        options: dict[str, Any] = {"transport": transport, "retries": retries}
        if is_async:
            self.client: Any = AsyncClient("http://server/v1", KEY, sleep=self.clock.sleep_awaiting, **options)
        else:
            self.client = Client("http://server/v1", KEY, sleep=self.clock.sleep, **options)

    def __call__(self, value: Any) -> Any:
        return self._runner.run(value) if inspect.iscoroutine(value) else value

    def harvest(self, prompts: Any = HARVEST_PROMPTS, **options: Any) -> Any:
        return self(self.client.harvest(prompts, model=options.pop("model", "stub"), **options))

    def done(self, prompts: Any = HARVEST_PROMPTS, **options: Any) -> Any:
        return self(self.harvest(prompts, **options).wait())

    def close(self) -> None:
        self(self.client.aclose() if isinstance(self.client, AsyncClient) else self.client.close())

    def posts(self) -> int:
        return sum(asked.method == "POST" for asked in self.stub.asked)

    def _handle(self, request: httpx2.Request) -> httpx2.Response:
        if self.fails:
            raise self.fails.pop(0)
        reply = self.stub.answer(request.method, str(request.url), dict(request.headers), request.content)
        return httpx2.Response(reply.status, headers=reply.headers, content=reply.body)


@pytest.fixture
def stub(tmp_path: Path) -> StubHarvests:
    return StubHarvests(tmp_path / "server")


@pytest.fixture(params=["plain", "async"])
def user(request: pytest.FixtureRequest, stub: StubHarvests) -> Iterator[HarvestUser]:
    with asyncio.Runner() as runner:
        one = HarvestUser(stub, request.param == "async", runner)
        yield one
        one.close()


@pytest.fixture
def plain_user(stub: StubHarvests) -> Iterator[HarvestUser]:
    with asyncio.Runner() as runner:
        one = HarvestUser(stub, False, runner)
        yield one
        one.close()
