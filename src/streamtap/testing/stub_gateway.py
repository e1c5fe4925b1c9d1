"""A gateway over a stub engine, asked without a network: one ASGI call at a time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

from fastapi import FastAPI
from starlette.types import ASGIApp, Message

from streamtap.server.app import create_app
from streamtap.server.clock import Clock, SystemClock
from streamtap.server.config import Limits, ModelConfig, ServerConfig, Timing
from streamtap.server.db import Database
from streamtap.server.harvests.asking import Workers
from streamtap.server.ledger import Ledger
from streamtap.server.ledger.keys import SCOPES, KeyLimits, Keys
from streamtap.server.models.catalog import Served
from streamtap.server.models.counting import TokenCounter
from streamtap.server.models.facts import ModelFacts
from streamtap.testing.characters import VOCABULARY, CharacterTokenizer
from streamtap.testing.stub_engine import StubPool

if TYPE_CHECKING:
    from streamtap.server.pool.pool import Pool

CONTEXT = 2048
FACTS = ModelFacts(
    n_layers=4, hidden=8, max_model_len=CONTEXT, vocabulary=VOCABULARY, dtype="float32", checkpoint="org/stub"
)
MODEL = ModelConfig(id="stub", checkpoint="org/stub", max_activation_prompt_tokens=64)
MUTE = ModelConfig(id="mute", checkpoint="org/mute", activations=False)


@cache
def _empty_database() -> bytes:
    """SQLite's file with the schema in it, which takes long to make."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "empty.db"
        Database.open(f"sqlite:///{file}").close()
        return file.read_bytes()


class CharacterCounter(TokenCounter):
    """Counts a token a character and a BOS."""

    def _encoded(self, text: str, add_special_tokens: bool, index: int) -> list[int]:
        return list(CharacterTokenizer()(text, add_special_tokens=add_special_tokens)["input_ids"])


@dataclass
class Answer:
    """What came back; ``pieces`` as they were sent, ``whole`` whether the body came to its end."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    pieces: list[bytes] = field(default_factory=list)
    whole: bool = False

    @property
    def body(self) -> bytes:
        """All pieces."""
        return b"".join(self.pieces)

    @property
    def json(self) -> Any:
        """The body, read."""
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """The error's code."""
        return str(self.json["error"]["code"])


class StubGateway:
    """An application with one model, its database in ``folder``, and a key that may do everything."""

    def __init__(
        self,
        folder: Path,
        pool: StubPool,
        *,
        limits: Limits | None = None,
        timing: Timing | None = None,
        clock: Clock | None = None,
        models: Sequence[ModelConfig] = (MODEL, MUTE),
        key_limits: KeyLimits | None = None,
        workers: Workers | None = None,
    ) -> None:
        self.pool = pool
        self.clock = clock or SystemClock()
        self.config = ServerConfig(
            models=tuple(models), data_dir=folder, limits=limits or Limits(), timing=timing or Timing()
        )
        (folder / "streamtap.db").write_bytes(_empty_database())
        self.database = Database.open(self.config.database_url)
        self.keys = Keys(self.database, now=self.clock.now)
        self.key = self.keys.create("tester", scopes=SCOPES, limits=key_limits).secret
        self.ledger = Ledger(self.database, self.config.limits, gateway="stub", now=self.clock.now)
        catalog = {
            model.id: Served(model, replace(FACTS, checkpoint=model.checkpoint), CharacterCounter(FACTS))
            for model in models
        }
        self.app: FastAPI = create_app(
            self.config,
            ledger=self.ledger,
            pool=cast("Pool", pool),
            catalog=catalog,
            clock=self.clock,
            workers=workers,
        )

    @property
    def usage(self) -> dict[str, Any]:
        """What ``GET /v1/usage`` says of the key, less the way there."""
        return self.ledger.usage(self.keys.get("tester"))

    async def close(self) -> None:
        """Let go of everything."""
        self.app.state.service.close()
        self.database.close()

    async def ask(self, body: Any, *, key: str | None = "", **headers: str) -> Answer:
        """POST /v1/completions; ``key`` None sends none, empty the tester's."""
        return await self.begin(body, key=key, **headers).answer()

    def begin(self, body: Any, *, key: str | None = "", **headers: str) -> Call:
        """As ``ask``, but returns at once."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        told = {"authorization": f"Bearer {key or self.key}"} if key is not None else {}
        return Call(self.app, "POST", "/v1/completions", {**told, **headers}, [raw])

    async def get(
        self, path: str, *, method: str = "GET", key: str | None = "", body: Any = b"", **headers: str
    ) -> Answer:
        """Any other address, with its query."""
        return await self.call(path, method=method, key=key, body=body, **headers).answer()

    def call(self, path: str, *, method: str = "GET", key: str | None = "", body: Any = b"", **headers: str) -> Call:
        """As ``get``, but returns at once."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        told = {"authorization": f"Bearer {key or self.key}"} if key is not None else {}
        return Call(self.app, method, path, {**told, **headers}, [raw])


class Call:
    """One ASGI call that runs in this event loop; ``leave`` is what a client does that goes away."""

    def __init__(self, app: ASGIApp, method: str, path: str, headers: dict[str, str], chunks: Sequence[bytes]) -> None:
        self.answered = Answer()
        self._chunks = list(chunks)
        self._gone = asyncio.Event()
        path, _, query = path.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": query.encode(),
            "headers": [(name.replace("_", "-").lower().encode(), value.encode()) for name, value in headers.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    def leave(self) -> None:
        """Go away."""
        self._gone.set()

    async def answer(self) -> Answer:
        """What came back once the application is done; a broken connection leaves it not whole."""
        try:
            await self.task
        except ConnectionAbortedError:
            self.answered.whole = False
        return self.answered

    async def until(self, condition: Callable[[Answer], bool]) -> None:
        """Return once ``condition`` holds of what came so far.

        Raises:
            TimeoutError: it did not within ten seconds.
        """
        async with asyncio.timeout(10):
            while not condition(self.answered):
                await asyncio.sleep(0.001)

    async def _receive(self) -> Message:
        if self._chunks:
            return {"type": "http.request", "body": self._chunks.pop(0), "more_body": bool(self._chunks)}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.answered.status = message["status"]
            self.answered.headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
            return
        if piece := message.get("body", b""):
            self.answered.pieces.append(piece)
        if not message.get("more_body", False):
            # What servers do: from now on they say that the client is gone.
            self.answered.whole = True
            self._gone.set()
            await asyncio.sleep(0)
