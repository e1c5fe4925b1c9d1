"""The threads that wait for a service's answers: what fails in one holds up nobody, and an idle one holds nothing."""

from __future__ import annotations

import gc
import queue
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from streamtap.engines.api_lanes import Lanes
from streamtap.errors import InvalidInput


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What threads that ended by a fault said."""
    said: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lambda each: said.append(each.exc_type))
    return said


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    made = Lanes(1)
    yield made
    made.close()


def test_what_waits_behind_a_job_that_fails_is_run(lanes: Lanes, told: list[Any]) -> None:
    begin, ended = threading.Event(), queue.SimpleQueue[int]()

    def fails() -> None:
        begin.wait(10)
        raise ZeroDivisionError("a fault of ours")

    lanes.put(fails)
    lanes.put(fails)
    lanes.put(lambda: ended.put(1))
    begin.set()

    assert ended.get(timeout=10) == 1
    # Python tells of a thread once that ends, which the other lane does not wait for.
    end = time.monotonic() + 10
    while len(told) < 2 and time.monotonic() < end:
        time.sleep(0.01)
    assert told == [ZeroDivisionError, ZeroDivisionError]


def test_a_lane_that_waits_keeps_nothing_of_its_last_job(lanes: Lanes) -> None:
    class Client:
        pass

    client, ended = Client(), threading.Event()
    lanes.put(lambda kept=client: ended.set())  # type: ignore[misc]
    held = weakref.ref(client)
    del client
    assert ended.wait(10)

    # It may not have come back to its queue yet.
    end = time.monotonic() + 10
    while held() is not None and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    assert held() is None


def test_a_reader_of_closed_lanes_is_told(lanes: Lanes) -> None:
    found = lanes.each(lambda item, _stopped: item, range(10))
    assert next(found) == (0, 0)
    lanes.close()

    with pytest.raises(InvalidInput, match="this engine is closed; load it again"):
        list(found)
