"""A whole service in the place of a client's network: completions and harvests of one fake model, whose rows agree."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx2

from streamtap.client.retrying import PATIENT
from streamtap.client.sync import Client
from streamtap.completion import CompletionRequest, Delta, Event, Failed, Finished
from streamtap.errors import StreamtapError
from streamtap.testing.fake_completer import FakeCompleter
from streamtap.testing.fake_engine import FakeEngine
from streamtap.testing.stub_harvests import KEY, MODEL, StubHarvests
from streamtap.wire import sse
from streamtap.wire.answers import json_answer
from streamtap.wire.errors import error_body
from streamtap.wire.requests import CompletionBody, read_body

_HEAD: dict[str, Any] = {"id": "cmpl-1", "created": 0, "model": "org/fake"}
_JSON = {"content-type": "application/json"}
#: The address that it is asked at, and that its harvests are given out at.
BASE = "http://server/v1"
#: What our own extensions are told by; another service tells of none of them.
EXTENSIONS = ("output_positions", "output_dtypes", "least_max_tokens", "harvest")


@dataclass
class StubService:
    """Answers requests of ``httpx2``: the handler of a ``MockTransport``.

    Args:
        folder: Where the files of harvests go.
        can: Capabilities to tell in place of, or beside, the usual; one that is None is not told.
        about: The same of what stands beside the capabilities.
        seconds: How long each completion takes.
        before: Called with each request; what it returns is answered instead, and what it raises breaks the connection.
        engine: Completes.

    ``asked`` are the bodies of completions, ``sent_bytes`` the length of their answers together, and ``most_at_once``
    how many were under way at the same time.
    """

    folder: Path
    can: Mapping[str, Any] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    before: Callable[[httpx2.Request], httpx2.Response | None] | None = None
    engine: FakeCompleter = field(default_factory=lambda: FakeCompleter(dtype="float32"))
    asked: list[dict[str, Any]] = field(default_factory=list)
    sent_bytes: int = 0
    most_at_once: int = 0
    _under_way: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        """Let harvests have the same model."""
        engine = self.engine
        fake = FakeEngine(n_layers=engine.n_layers, hidden=engine.hidden, context_tokens=engine.context_tokens)
        self.harvests = StubHarvests(self.folder, engine=fake)

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        """The answer to one request."""
        if self.before is not None and (instead := self.before(request)) is not None:
            return instead
        if request.url.path == "/v1/models":
            return httpx2.Response(HTTPStatus.OK, json={"object": "list", "data": [self.model()]})
        if request.url.path != "/v1/completions":
            reply = self.harvests.answer(request.method, str(request.url), dict(request.headers), request.content)
            return httpx2.Response(reply.status, headers=reply.headers, content=reply.body)
        with self._counted():
            answer = self._completed(request.content)
        with self._lock:
            self.sent_bytes += len(answer.content)
        return answer

    def client(self) -> Client:
        """A client whose network this is; it waits for nothing."""
        return Client(
            BASE,
            KEY,
            retries=replace(PATIENT, connects=0),
            transport=httpx2.MockTransport(self),
            sleep=lambda _seconds: None,
        )

    def model(self) -> dict[str, Any]:
        """The one entry of ``GET /v1/models``."""
        engine = self.engine
        usual = {
            "max_model_len": engine.context_tokens,
            "max_inflight_per_key": 16,
            "prompt_logprobs": True,
            "activations": True,
            "max_activation_prompt_tokens": 1024,
            "least_max_tokens": 0,
            "output_positions": True,
            "output_dtypes": ["bfloat16", "float32"],
            "harvest": True,
            "n_layers": engine.n_layers,
            "hidden_size": engine.hidden,
            "dtype": engine.dtype,
        }
        about = {"id": MODEL, "object": "model", "served_model_name": "org/fake"}
        return _told(about, self.about) | {"capabilities": _told(usual, self.can)}

    def _completed(self, content: bytes) -> httpx2.Response:
        try:
            body = read_body(content)
            events = list(self._events(_request(body, self.engine)))
        except StreamtapError as error:
            return httpx2.Response(HTTPStatus.BAD_REQUEST, content=error_body(error, "r"), headers=_JSON)
        with self._lock:
            self.asked.append(json.loads(content))
        if body.streams:
            chunks = [sse.chunk_event(each, include_usage=True, **_HEAD) for each in events if isinstance(each, Delta)]
            ends = [sse.usage_event(_finished(events).usage, **_HEAD), sse.DONE]
            return httpx2.Response(
                HTTPStatus.OK, content=b"".join([*chunks, *ends]), headers={"content-type": sse.MEDIA_TYPE}
            )
        return httpx2.Response(HTTPStatus.OK, content=b"".join(json_answer(_finished(events), **_HEAD)), headers=_JSON)

    def _events(self, asked: CompletionRequest) -> Iterator[Event]:
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.engine.submit(asked, events.put)
        while True:
            event = events.get(timeout=20)
            if isinstance(event, Failed):
                raise event.error
            yield event
            if isinstance(event, Finished):
                return

    @contextmanager
    def _counted(self) -> Iterator[None]:
        with self._lock:
            self._under_way += 1
            self.most_at_once = max(self.most_at_once, self._under_way)
        time.sleep(self.seconds)
        try:
            yield
        finally:
            with self._lock:
                self._under_way -= 1


def _told(usual: Mapping[str, Any], instead: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in {**usual, **instead}.items() if value is not None}


def _request(body: CompletionBody, engine: FakeCompleter) -> CompletionRequest:
    most = 1 if body.max_tokens is None else body.max_tokens
    return body.to_request(max_tokens=most, n_layers=engine.n_layers, hidden=engine.hidden)


def _finished(events: list[Event]) -> Finished:
    (last,) = (event for event in events if isinstance(event, Finished))
    return last
