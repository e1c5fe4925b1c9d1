"""An engine process that says what a test wrote down, on a port of this machine; and a pool that has it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from starlette.types import Receive, Scope, Send

from streamtap.errors import StreamtapError
from streamtap.testing.hub_server.running import Running, address, listen, run

#: In a script: the connection breaks here.
BREAK = object()


@dataclass
class Script:
    """One answer: bytes are sent, numbers are seconds of silence, ``BREAK`` ends the connection."""

    pieces: Iterable[Any]
    status: int = 200
    media: str = "application/json"


def answers(body: Any, **about: Any) -> Script:
    """A JSON answer in one piece."""
    return Script([json.dumps(body).encode()], **about)


def completion(text: str = "b", prompt_tokens: int = 2, completion_tokens: int = 1, **more: Any) -> dict[str, Any]:
    """A completion as an engine writes it, ``usage`` before the choices."""
    total = prompt_tokens + completion_tokens
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    about = {"id": "cmpl-1", "object": "text_completion", "created": 0, "model": "org/stub"}
    return {**about, "usage": usage, "choices": [choice], **more}


class StubEngine:
    """Answers POST /v1/completions by ``script``, which is given the body; a context manager that serves."""

    def __init__(self, script: Callable[[Mapping[str, Any]], Script] | None = None) -> None:
        self.script = script or (lambda _body: answers(completion()))
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.left = 0
        self._running: Running | None = None
        self.base_url = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        raw = bytearray()
        while (message := await receive())["type"] == "http.request":
            raw += message["body"]
            if not message["more_body"]:
                break
        self.bodies.append(json.loads(bytes(raw)))
        self.headers.append({name.decode(): value.decode() for name, value in scope["headers"]})
        said = self.script(self.bodies[-1])
        saying = asyncio.ensure_future(_say(said, send))
        gone = asyncio.ensure_future(receive())
        await asyncio.wait([saying, gone], return_when=asyncio.FIRST_COMPLETED)
        if not saying.done():
            self.left += 1
            saying.cancel()
            return
        gone.cancel()
        saying.result()

    def __enter__(self) -> Self:
        """Serve."""
        listening = listen(0)
        self.base_url = address(listening)
        self._running = run(self, [listening])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trail: TracebackType | None
    ) -> None:
        """Stop."""
        if self._running is not None:
            self._running.stop()


async def _say(said: Script, send: Send) -> None:
    headers = [(b"content-type", said.media.encode())]
    started = False
    for piece in said.pieces:
        if isinstance(piece, int | float):
            await asyncio.sleep(piece)
            continue
        if not started:
            await send({"type": "http.response.start", "status": said.status, "headers": headers})
            started = True
        if piece is BREAK:
            raise ConnectionAbortedError("as the script says")
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    if not started:
        await send({"type": "http.response.start", "status": said.status, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


@dataclass(frozen=True)
class StubEndpoint:
    """Where the engine answers."""

    base_url: str
    headers: dict[str, str] = field(default_factory=dict)
    model: str = "org/stub"


class StubPool:
    """A pool with one engine, which is ready unless ``cold`` says otherwise."""

    def __init__(self, base_url: str = "http://127.0.0.1:9") -> None:
        self.base_url = base_url
        self.cold: asyncio.Event | None = None
        self.refuses: StreamtapError | None = None
        self.leases: list[tuple[str, str]] = []
        self.held = 0
        self.good = 0
        self.failures: list[StreamtapError] = []

    @asynccontextmanager
    async def lease(self, model_id: str, role: str) -> AsyncIterator[StubEndpoint]:
        """The engine, once it is ready."""
        self.leases.append((model_id, role))
        if self.refuses is not None:
            raise self.refuses
        if self.cold is not None:
            await self.cold.wait()
        self.held += 1
        try:
            yield StubEndpoint(self.base_url)
        finally:
            self.held -= 1

    def succeeded(self, endpoint: StubEndpoint) -> None:
        """Count it."""
        self.good += 1

    def failed(self, endpoint: StubEndpoint, error: StreamtapError) -> None:
        """Keep it."""
        self.failures.append(error)

    def is_ready(self, model_id: str, role: str) -> bool:
        """Whether the engine is."""
        return self.cold is None

    def boot(self, model_id: str, role: str) -> dict[str, Any]:
        """How far the engine is."""
        stage = "ready" if self.is_ready(model_id, role) else "cold"
        return {"warm": stage == "ready", "stage": stage, "stage_label": stage, "stage_age_s": 0.0}

    def states(self) -> list[dict[str, Any]]:
        """The one engine."""
        return [{"model": "stub", "role": "completions", "state": self.boot("", "")["stage"]}]
