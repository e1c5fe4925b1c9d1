"""What a service's failing is told as: an answer that is none, a closed engine, another model than was loaded."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest

from streamtap import UnifiedCache
from streamtap.activations import Activations, join
from streamtap.client.sync import Client
from streamtap.completion import CaptureAsk, CompletionRequest, Event, Failed, Finished
from streamtap.engines import api
from streamtap.engines.api import ApiEngine
from streamtap.engines.tokenizing import PromptTokenizer
from streamtap.errors import EngineDead, EngineFailed, InvalidInput, ModelNotFound, ServerRestarting
from streamtap.spec import CaptureSpec
from streamtap.testing.characters import VOCABULARY
from streamtap.testing.stub_harvests import KEY, MODEL
from streamtap.testing.stub_service import BASE, StubService
from streamtap.wire.errors import error_body

BEFORE, AFTER = "1" * 40, "2" * 40
JSON = {"content-type": "application/json"}
Load = Callable[..., ApiEngine]


class Watched(StubService):
    """Counts how often its list is asked for, and does ``act`` once, before it answers the first completion."""

    listed = 0
    act: Callable[[], None] | None = None

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        self.listed += request.url.path == "/v1/models"
        if request.url.path == "/v1/completions" and (act := self.act) is not None:
            self.act = None
            act()
        return super().__call__(request)


@pytest.fixture
def service(tmp_path: Path) -> Watched:
    return Watched(tmp_path / "server", about={"revision": BEFORE})


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No thread may end by a fault."""
    told: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    yield
    assert told == []


def capture(engine: ApiEngine, prompts: Any = ([5, 6], [7])) -> Activations:
    return join(list(engine.capture(list(prompts), CaptureSpec(layers=[1]))))


def events_of(engine: ApiEngine, request: CompletionRequest) -> queue.SimpleQueue[Event]:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    engine.submit(request, events.put)
    return events


# An answer that is none.


@pytest.mark.usefixtures("silent")
def test_an_answer_of_another_shape_is_a_failure_and_holds_up_nobody(service: Watched, load: Load) -> None:
    service.can = {"max_inflight_per_key": 1}
    engine, sound = load(), CompletionRequest(((5, 6),), 1, capture=CaptureAsk((0,)))
    strange = json.dumps({"choices": [{"index": "x", "text": ""}]}).encode()
    answers = [strange, strange]
    service.before = lambda request: (
        httpx2.Response(200, content=answers.pop(), headers=JSON)
        if request.url.path == "/v1/completions" and answers
        else None
    )

    first, second = (events_of(engine, sound) for _ in range(2))
    third = events_of(engine, sound)

    for failed in (first.get(timeout=10), second.get(timeout=10)):
        assert isinstance(failed, Failed)
        assert type(failed.error) is EngineFailed
        assert "answer is not of the shape that was expected (ValueError)" in str(failed.error)
    assert isinstance(third.get(timeout=10), Finished)
    answers[:] = [strange]
    with pytest.raises(EngineFailed, match="not of the shape that was expected"):
        capture(engine, [[5, 6]])


def test_a_listener_that_fails_holds_up_nobody(service: Watched, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", lambda each: told.append(each.exc_type))
    service.can = {"max_inflight_per_key": 1}
    engine = load()

    def emit(_event: Event) -> None:
        raise ZeroDivisionError("the listener's")

    for stream in (True, False):
        engine.submit(CompletionRequest(((5, 6),), 2, stream=stream), emit)

    assert isinstance(events_of(engine, CompletionRequest(((5, 6),), 1)).get(timeout=10), Finished)
    assert told == [ZeroDivisionError, ZeroDivisionError]
    assert engine._flights._open == set()


# An engine that is closed.


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("broken", [True, False])
def test_closing_under_requests_is_told_to_their_reader(service: Watched, load: Load, broken: bool) -> None:
    service.can = {"max_inflight_per_key": 2}
    engine, held, asked = load(), threading.Event(), threading.Semaphore(0)
    engine._owns_client = True

    def before(request: httpx2.Request) -> None:
        if request.url.path == "/v1/completions":
            asked.release()
            held.wait(10)
            if broken:
                raise httpx2.ReadError("closed")

    service.before = before  # type: ignore[assignment]
    failed: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    reader = threading.Thread(target=lambda: failed.put(_failure(lambda: capture(engine, [[5, i] for i in range(9)]))))
    reader.start()
    for _ in range(2):
        assert asked.acquire(timeout=10)

    engine.close()
    held.set()
    reader.join(10)

    error = failed.get(timeout=10)
    assert isinstance(error, InvalidInput)
    assert str(error) == "this engine is closed; load it again."


def _failure(act: Callable[[], Any]) -> BaseException | None:
    try:
        act()
    except BaseException as error:
        return error
    return None


@pytest.mark.usefixtures("silent")
def test_closing_under_a_job_is_told_to_its_reader(service: Watched, load: Load) -> None:
    engine = load(harvest_from=2)
    engine._owns_client = True

    def before(request: httpx2.Request) -> None:
        if request.url.path.startswith("/v1/harvest/"):
            engine.close()
            raise httpx2.ReadError("closed")

    service.before = before  # type: ignore[assignment]

    with pytest.raises(InvalidInput, match="this engine is closed"):
        capture(engine)


# Another model than was loaded.


def test_a_capture_asks_once_whether_the_model_is_there(service: Watched, load: Load) -> None:
    engine = load()
    assert service.listed == 1

    capture(engine, [[5, i] for i in range(40)])
    assert service.listed == 2
    capture(engine)
    assert service.listed == 3


@pytest.mark.parametrize(
    ("about", "can", "said"),
    [
        ({"revision": AFTER}, {}, f"its revision was {BEFORE} and is {AFTER} now; load the model again"),
        ({"revision": None}, {}, f"its revision was {BEFORE} and is None now"),
        ({"served_model_name": "org/other"}, {}, "its checkpoint was org/fake and is org/other now"),
        ({}, {"dtype": "bfloat16"}, "its dtype was float32 and is bfloat16 now"),
        ({}, {"n_layers": 5}, "its number of layers was 4 and is 5 now"),
        ({}, {"hidden_size": 9}, "its width was 8 and is 9 now"),
    ],
)
def test_another_model_is_refused_before_it_runs(
    service: Watched, load: Load, about: dict[str, Any], can: dict[str, Any], said: str
) -> None:
    engine = load()
    service.about, service.can = {"revision": BEFORE, **about}, can

    with pytest.raises(InvalidInput, match=f"the service's stub is another model than was loaded: {said}"):
        capture(engine)
    assert service.asked == []


def test_a_model_that_is_there_no_more_is_refused(service: Watched, load: Load) -> None:
    engine = load()
    service.about = {"revision": BEFORE, "id": "other"}

    with pytest.raises(ModelNotFound, match="its models are: other"):
        capture(engine)


def test_what_was_not_told_may_be_told_later(service: Watched, load: Load) -> None:
    """A checkpoint is on the service's disk once its engine has fetched it."""
    service.about = {}
    engine = load()
    service.about = {"revision": BEFORE}

    assert len(capture(engine)) == 2


@pytest.mark.parametrize("way", ["broken", "dead"])
def test_a_service_that_comes_back_with_another_model_is_found_out(service: Watched, load: Load, way: str) -> None:
    engine = load()

    def comes_back() -> None:
        service.about = {"revision": AFTER}
        gone = [1]

        def before(request: httpx2.Request) -> httpx2.Response | None:
            if request.url.path != "/v1/completions" or not gone:
                return None
            gone.pop()
            if way == "broken":
                raise httpx2.ReadError("reset")
            return httpx2.Response(502, content=error_body(EngineDead("the engine ended."), "r"), headers=JSON)

        service.before = before

    service.act = comes_back

    with pytest.raises(InvalidInput, match=f"its revision was {BEFORE} and is {AFTER} now"):
        capture(engine)


def test_a_service_that_comes_back_as_it_was_is_asked_once_more(service: Watched, load: Load) -> None:
    service.can = {"max_inflight_per_key": 1}
    engine, gone = load(), [1, 1, 1]

    def before(request: httpx2.Request) -> None:
        if request.url.path == "/v1/completions" and gone:
            gone.pop()
            raise httpx2.ConnectError("refused")

    service.before = before  # type: ignore[assignment]

    assert len(capture(engine, [[5, i] for i in range(9)])) == 9
    assert service.listed == 3, "loaded, begun, come back"


def test_a_restart_that_the_client_waits_out_is_noticed_too(
    service: Watched, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = httpx2.MockTransport(service)
    monkeypatch.setattr(api, "Client", partial(Client, transport=transport, sleep=lambda _seconds: None))
    engine = load(client=None, api_key=KEY)

    def restarts() -> None:
        service.about = {"revision": AFTER}
        answers = [httpx2.Response(503, content=error_body(ServerRestarting("soon."), "r"), headers=JSON)]
        service.before = lambda request: answers.pop() if request.url.path == "/v1/completions" and answers else None

    service.act = restarts

    with pytest.raises(InvalidInput, match=f"its revision was {BEFORE} and is {AFTER} now"):
        capture(engine)


def test_a_job_that_ran_another_commit_is_refused(service: Watched, load: Load) -> None:
    """It tells by itself what ran it, so nothing more is asked."""
    same, other = (replace(service.harvests.engine, named={"commit": commit}) for commit in (BEFORE, AFTER))
    engine = load(harvest_from=2)
    service.harvests.engine = same
    assert len(capture(engine)) == 2
    assert service.listed == 2

    service.harvests.engine = other
    with pytest.raises(InvalidInput, match=f"its revision was {BEFORE} and is {AFTER} now"):
        capture(engine)


# What came before a failure.


def test_what_was_answered_before_a_failure_is_in_the_cache(service: Watched, tmp_path: Path) -> None:
    service.can = {"max_inflight_per_key": 1}
    named = {"client": service.client(), "tokenizer": PromptTokenizer(None, vocabulary=VOCABULARY)}
    prompts = [[5 + i, 6] for i in range(61)]

    def before(request: httpx2.Request) -> httpx2.Response | None:
        if request.url.path != "/v1/completions" or len(service.asked) != 60:
            return None
        return httpx2.Response(400, content=error_body(InvalidInput("not this one."), "r"), headers=JSON)

    service.before = before
    cache = UnifiedCache(
        MODEL,
        layers=[1],
        compute_perplexity=False,
        cache_dir=tmp_path / "cache",
        progress=False,
        backend="api",
        api_base=BASE,
        engine_options=named,
    )
    with pytest.raises(InvalidInput, match="not this one"):
        cache.warmup(prompts)
    service.before = None

    assert cache.warmup(prompts).activations_extracted == 1
    assert len(service.asked) == 61
    cache.close()
