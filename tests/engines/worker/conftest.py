"""A worker over a fake engine, on a port of this machine, in a thread."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
import pytest

from streamtap.engines.base import Completes
from streamtap.engines.worker.app import Worker
from streamtap.engines.worker.serving import ServingOptions, WorkerServer
from streamtap.engines.worker.stages import Enter, Loading
from streamtap.testing.fake_completer import FakeCompleter


def until(said: Callable[[], bool], seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while not said():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


@dataclass
class Served:
    """A worker that answers at ``url``."""

    worker: Worker
    engine: FakeCompleter
    port: int
    client: httpx2.Client

    @property
    def is_idle(self) -> bool:
        return self.worker.live == self.engine.running == 0

    def post(self, body: Any = None, **more: Any) -> httpx2.Response:
        asked = {"model": "org/fake", "prompt": "hello", "max_tokens": 3, "temperature": 0} | (body or {})
        return self.client.post("/v1/completions", json=asked, **more)

    def stream(self, body: Any) -> Any:
        asked = {"model": "org/fake", "prompt": "hello", "max_tokens": 3, "temperature": 0, "stream": True} | body
        return self.client.stream("POST", "/v1/completions", json=asked)

    def connection(self, body: bytes) -> socket.socket:
        """A connection of its own that has sent ``body`` and read nothing."""
        connection = socket.create_connection(("127.0.0.1", self.port))
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        return connection


@contextmanager
def serving(
    engine: FakeCompleter, load: Callable[[Enter], Completes] | None = None, *, key: str | None = None, **options: Any
) -> Iterator[Served]:
    worker = Worker(Loading(), name="org/fake", key=key, keepalive_seconds=options.pop("keepalive_seconds", 5.0))
    given = ServingOptions(name="org/fake", port=0, **{"grace_seconds": 5.0, **options})
    server = WorkerServer(worker, load or (lambda _enter: engine), given)
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.bind(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])))
    thread.start()
    assert until(lambda: server.started)
    assert load or until(lambda: worker.loading.engine is not None)
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
            yield Served(worker, engine, port, client)
    finally:
        server.stop_after(0)
        thread.join()


@pytest.fixture
def serve() -> Any:
    return serving


@pytest.fixture
def served() -> Iterator[Served]:
    with serving(FakeCompleter()) as found:
        yield found


@pytest.fixture
def wait_until() -> Callable[..., bool]:
    return until
