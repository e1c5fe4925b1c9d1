"""A client that leaves has its work stopped, once; one that stays is never charged with a cancel (V55)."""

from __future__ import annotations

import gc
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from streamtap.completion import Finished
from streamtap.engines.worker import completing
from streamtap.engines.worker.clients import Client
from streamtap.engines.worker.flights import Flight
from streamtap.testing.fake_completer import FakeCompleter

BODY = b'{"prompt": "hello", "max_tokens": 2000, "temperature": 0%s}'
MIB = 1 << 20


@pytest.fixture
def slow(serve: Any) -> Any:
    with serve(FakeCompleter(token_seconds=0.02)) as served:
        yield served


@pytest.mark.parametrize("more", [b"", b', "stream": true'], ids=["whole", "stream"])
def test_work_stops_when_the_client_leaves(slow: Any, wait_until: Any, more: bytes) -> None:
    with slow.connection(BODY % more):
        assert wait_until(lambda: slow.engine.steps >= 3)
        assert slow.client.get("/health").json()["live"] == 1

    assert wait_until(lambda: slow.is_idle)
    steps = slow.engine.steps
    time.sleep(0.1)
    assert slow.engine.steps == steps
    assert slow.engine.cancelled == 1
    assert slow.client.get("/health").json()["live"] == 0


def test_a_request_that_ends_is_not_cancelled(served: Any) -> None:
    for number in range(100):
        kinds: list[dict[str, Any]] = [
            {},
            {"stream": True},
            {"vllm_xargs": {"output_residual_stream": True}},
            {"n": 17},
        ]
        served.post(kinds[number % 4])

    assert len(served.engine.requests) == 75
    assert served.engine.cancelled == 0
    assert served.is_idle


def test_many_that_leave_at_once_are_each_cancelled_once(slow: Any, wait_until: Any) -> None:
    connections = [slow.connection(BODY % b"") for _ in range(12)]
    assert wait_until(lambda: slow.engine.running == 12)
    for connection in connections:
        connection.close()

    assert wait_until(lambda: slow.is_idle)
    assert slow.engine.cancelled == 12


class Watched:
    """Pieces of a body without end, counted as they are made."""

    def __init__(self) -> None:
        self.made = 0
        self.closed = threading.Event()

    def __call__(self, *_: Any, **__: Any) -> Iterator[bytes]:
        try:
            while self.made < 1000:
                self.made += 1
                yield bytes(MIB)
        finally:
            self.closed.set()


def test_a_slow_reader_holds_the_making_back(served: Any, wait_until: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched()
    monkeypatch.setattr(completing, "json_answer", watched)
    with served.connection(b'{"prompt": "hello", "max_tokens": 1}') as connection:
        connection.recv(MIB)
        assert wait_until(lambda: _stands_still(watched))
        held = watched.made

        assert held <= 16  # what the kernel's buffers take, and three pieces
        assert served.post({"model": "other"}).status_code == 400  # the loop is free
        for _ in range(40):
            connection.recv(MIB, socket.MSG_WAITALL)
        assert watched.made > held
        assert not watched.closed.is_set()

    assert watched.closed.wait(10)
    assert wait_until(lambda: served.is_idle)
    assert served.engine.cancelled == 0  # the engine had done its part


def _stands_still(watched: Watched) -> bool:
    made = watched.made
    time.sleep(0.2)
    return watched.made == made > 0


def test_a_client_that_leaves_before_its_body_is_whole_asked_for_nothing(served: Any, wait_until: Any) -> None:
    with socket.create_connection(("127.0.0.1", served.port)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")

    assert served.post().status_code == 200
    assert wait_until(lambda: served.is_idle)
    assert len(served.engine.requests) == 1


def test_nothing_of_an_answered_request_waits_for_the_collector(served: Any, wait_until: Any) -> None:
    def held() -> int:
        return sum(type(each) in (Flight, Client, Finished) for each in gc.get_objects())

    capture = {"vllm_xargs": {"output_residual_stream": [1]}}
    assert served.post(capture).status_code == 200
    gc.collect()
    gc.disable()
    try:
        for _ in range(20):
            assert served.post(capture).status_code == 200
        # The connection keeps its last request until the next one comes.
        assert wait_until(lambda: held() <= 3), held()
    finally:
        gc.enable()
