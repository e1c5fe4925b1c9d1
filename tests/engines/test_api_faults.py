"""A service's model whose way there fails: what is asked again, how often, and what ends it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import ml_dtypes
import numpy as np
import pytest

from streamtap.activations import Activations, join
from streamtap.engines.api import ApiEngine
from streamtap.engines.api_asking import Outages
from streamtap.engines.api_lanes import Insistence, Lanes
from streamtap.engines.base import AcrossNetwork
from streamtap.errors import (
    AccessDenied,
    ActivationQuotaExceeded,
    EngineDead,
    InvalidInput,
    InvalidKey,
    RateLimited,
    StreamtapError,
    TransferFailed,
)
from streamtap.spec import CaptureSpec
from streamtap.testing.stub_service import BASE, StubService
from streamtap.wire.errors import error_body

PROMPTS = [[5 + i, 6, 7][: 2 + i % 2] for i in range(30)]
Load = Callable[..., ApiEngine]


@pytest.fixture
def service(tmp_path: Path) -> StubService:
    return StubService(tmp_path / "server")


def capture(engine: ApiEngine, prompts: Any = PROMPTS, **spec: Any) -> Activations:
    return join(list(engine.capture(prompts, CaptureSpec(layers=[1], **spec))))


class Failing:
    """Answers the first ``times`` requests of one path by a failure, each kind in its turn."""

    def __init__(self, path: str, *kinds: Any, times: int = 1, method: str = "POST") -> None:
        self.path, self.kinds, self.left, self.method = path, kinds, times, method
        self.failed = 0
        self._lock = threading.Lock()

    def __call__(self, request: httpx2.Request) -> httpx2.Response | None:
        with self._lock:
            if request.method != self.method or not request.url.path.startswith(self.path) or not self.left:
                return None
            self.left -= 1
            kind = self.kinds[self.failed % len(self.kinds)]
            self.failed += 1
        if isinstance(kind, Exception) and not isinstance(kind, StreamtapError):
            raise kind
        if isinstance(kind, bytes):
            return httpx2.Response(200, content=kind, headers={"content-type": "application/json"})
        error, status = kind
        return httpx2.Response(status, content=error_body(error, "r"), headers={"content-type": "application/json"})


BROKEN = (
    httpx2.ConnectError("refused"),
    httpx2.ReadError("reset"),
    httpx2.RemoteProtocolError("closed in the middle"),
    b'{"id": "cmpl-1", "choi',
    (EngineDead("the engine ended."), 502),
)


def _is_whole(acts: Activations, service: StubService) -> bool:
    right = [service.engine.rows_engine.rows(ids, 1).astype(ml_dtypes.bfloat16) for ids in PROMPTS]
    return len(acts) == len(PROMPTS) and np.array_equal(acts.acts[1], np.concatenate(right))


def test_what_breaks_on_its_way_is_asked_again(service: StubService, load: Load) -> None:
    engine = load()
    service.before = failing = Failing("/v1/completions", *BROKEN, times=25)

    acts = capture(engine)

    assert failing.failed == 25
    assert _is_whole(acts, service), "nothing twice, nothing missing"
    assert len(service.asked) == 30


def test_whoever_waits_for_a_service_is_told_once(
    service: StubService, load: Load, caplog: pytest.LogCaptureFixture
) -> None:
    service.before = Failing("/v1/completions", httpx2.ConnectError("refused"), times=25)

    capture(load())

    assert caplog.messages == [
        f"waiting for the service: {BASE} cannot be reached (refused); is the server running there?"
    ]


def test_a_long_wait_is_told_of_every_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    seconds = iter([0.0, 0.0, 14.9, 15.0, 15.0, 20.0])
    outages = Outages(now=lambda: next(seconds))

    for name in ("first", "soon after", "later", "soon after that"):
        outages.waited_out(TransferFailed(f"{name}."))
    outages.note(InvalidInput("its own fault."))

    assert [message.rpartition(": ")[2] for message in caplog.messages] == ["first.", "later."]
    assert outages.count == 4


@pytest.mark.parametrize("kind", BROKEN, ids=["refused", "reset", "closed", "cut", "engine"])
def test_it_is_asked_again_as_often_as_was_said(service: StubService, load: Load, kind: Any) -> None:
    engine = load()
    assert isinstance(engine, AcrossNetwork)
    assert engine.trying(2) == 8
    service.before = failing = Failing("/v1/completions", kind, times=3)

    with pytest.raises(StreamtapError) as caught:
        capture(engine, [[5, 6]])
    assert failing.failed == 3
    assert isinstance(caught.value, TransferFailed | EngineDead)

    failing.left = 2
    assert len(capture(engine, [[5, 6]])) == 1


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidInput("no such thing."), 400),
        (InvalidKey("the key is not known."), 401),
        (ActivationQuotaExceeded("used 10/10."), 429),
        (AccessDenied("not this one."), 403),
    ],
)
def test_a_refusal_is_raised_at_once_by_its_class(service: StubService, load: Load, error: Any, status: int) -> None:
    engine = load()
    service.before = failing = Failing("/v1/completions", (error, status), times=100)

    with pytest.raises(type(error), match=str(error)):
        capture(engine, [[5, 6]])

    assert failing.failed == 1


def test_a_limit_that_says_when_it_ends_is_waited_out(service: StubService, load: Load) -> None:
    engine = load()
    engine.trying(0)
    limited = RateLimited("too many.")
    limited.retry_after_seconds = 60
    service.before = failing = Failing("/v1/completions", (limited, 429), times=5)

    assert _is_whole(capture(engine), service)
    assert failing.failed == 5


def test_a_harvest_goes_on_where_the_service_was_away(service: StubService, load: Load) -> None:
    """It is away at the submission, in the wait, and while the files are read."""
    engine = load(harvest_from=2)
    gone = [Failing("/v1/harvest", httpx2.ConnectError("refused"), times=2)]
    gone += [Failing("/v1/harvest/", httpx2.ReadError("reset"), times=3, method="GET")]
    gone += [Failing("/files/", httpx2.ReadError("reset"), times=2, method="GET")]

    def before(request: httpx2.Request) -> httpx2.Response | None:
        return next((answer for each in gone if (answer := each(request)) is not None), None)

    service.before = before
    acts = capture(engine)

    assert [each.failed for each in gone] == [2, 3, 2]
    assert len(service.harvests.jobs) == 1
    assert _is_whole(acts, service)


def test_a_job_that_may_not_have_been_taken_is_sent_again(service: StubService, load: Load) -> None:
    """The answer broke off, so that nobody knows its id."""
    engine = load(harvest_from=2)
    service.before = Failing("/v1/harvest", httpx2.ReadError("reset"))

    acts = capture(engine)

    assert len(service.harvests.jobs) == 1
    assert _is_whole(acts, service)


def test_a_second_job_that_may_not_have_been_taken_is_sent_again(service: StubService, load: Load) -> None:
    engine = load(harvest_from=2)
    service.harvests.most_prompts, service.harvests.slots = 15, 1
    posts: list[int] = []

    def before(request: httpx2.Request) -> httpx2.Response | None:
        if request.url.path == "/v1/harvest" and request.method == "POST":
            posts.append(1)
            if len(posts) == 5:  # too large, taken, no slot, nor then: the next is the second half's
                raise httpx2.ReadError("reset")
        return None

    service.before = before
    acts = capture(engine)

    assert len(posts) == 6
    assert len(service.harvests.jobs) == 2
    assert _is_whole(acts, service)


def test_files_that_stay_away_end_it(service: StubService, load: Load) -> None:
    engine = load(harvest_from=2, max_retries=1)
    service.before = failing = Failing("/files/", httpx2.ReadError("reset"), times=1000, method="GET")

    with pytest.raises(TransferFailed) as caught:
        capture(engine)

    assert failing.failed == 2 * 6, "six times by whoever follows links, twice over"
    assert "signature" not in str(caught.value)


@pytest.mark.parametrize("most", [-1, 1.5, "3"])
def test_a_number_of_retries_that_is_none(load: Load, most: Any) -> None:
    with pytest.raises(InvalidInput, match="max_retries must be a whole number"):
        load().trying(most)


def test_a_capture_that_is_left_stops_asking_again(service: StubService, load: Load) -> None:
    service.can = {"max_inflight_per_key": 1}
    engine = load(first_pause_seconds=30.0)
    failed = threading.Semaphore(0)

    def before(request: httpx2.Request) -> httpx2.Response | None:
        if len(service.asked) >= 64:  # a part is as many
            failed.release()
            raise httpx2.ConnectError("refused")
        return None

    service.before = before
    parts = engine.capture([[5, i] for i in range(90)], CaptureSpec(layers=[0]), ordered=False)
    next(parts)
    assert failed.acquire(timeout=10), "the one lane waits to ask again"
    parts.close()  # type: ignore[attr-defined]
    service.before = None

    begun = time.monotonic()
    assert len(capture(engine, [[5, 6]])) == 1
    assert time.monotonic() - begun < 10, "it waits no half a minute for a reader who has left"


def test_a_closed_engine_says_so(service: StubService, load: Load) -> None:
    engine = load()
    engine.close()
    engine.close()

    with pytest.raises(InvalidInput, match="closed"):
        engine.capture([[5]], CaptureSpec())
    with pytest.raises(InvalidInput, match="closed"):
        engine.complete([5], max_tokens=1)


def test_pauses_grow_and_end_with_the_reader() -> None:
    waited: list[float] = []

    class Reader(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waited.append(timeout or 0)
            return len(waited) == 8

    def ask() -> None:
        raise TransferFailed("away.")

    with pytest.raises(TransferFailed):
        Insistence(20, 0.5)(ask, stopped=Reader())

    assert waited == [0.5, 1, 2, 4, 8, 15, 15, 15]


def test_what_is_broken_here_reaches_the_reader() -> None:
    hook, told = threading.excepthook, []
    threading.excepthook = told.append

    def work(item: int, _stopped: threading.Event) -> int:
        if item == 3:
            raise ZeroDivisionError("a fault of ours")
        return item

    lanes = Lanes(2)
    try:
        with pytest.raises(ZeroDivisionError):
            list(lanes.each(work, range(10)))
        assert sorted(lanes.each(lambda item, _: item * 2, range(10))) == [(i, 2 * i) for i in range(10)]
        end = time.monotonic() + 10
        while not told and time.monotonic() < end:
            time.sleep(0.01)
    finally:
        lanes.close()
        threading.excepthook = hook
    assert [each.exc_type for each in told] == [ZeroDivisionError]
