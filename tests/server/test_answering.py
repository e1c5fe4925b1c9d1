"""Waiting for an engine, on a clock that the test moves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from streamtap.errors import CircuitOpen, EngineDead, EngineUnreachable
from streamtap.server.config import Timing
from streamtap.server.surface.reply import Reply
from streamtap.server.surface.trace import Trace
from streamtap.testing.fake_clock import FakeClock
from streamtap.testing.stub_engine import Script, StubEngine, StubPool, answers, completion
from streamtap.testing.stub_gateway import Call, StubGateway
from streamtap.wire.sse import DONE

ASK = {"model": "stub", "prompt": "a", "max_tokens": 1}
BINARY = ASK | {"output_residual_stream": True}
ACCEPT = {"accept": "application/vnd.safetensors"}

Act = Callable[[StubGateway, FakeClock, asyncio.Event], Coroutine[Any, Any, None]]


def _cold(folder: Path, act: Act, script: Script | None = None) -> None:
    """Run ``act`` with a gateway whose engine is cold until the event is set."""
    said = script or answers(completion())
    with StubEngine(lambda _body: said) as engine:

        async def main() -> None:
            clock, ready = FakeClock(), asyncio.Event()
            pool = StubPool(engine.base_url)
            pool.cold = ready
            gateway = StubGateway(folder, pool, clock=clock)
            await act(gateway, clock, ready)
            assert pool.held == 0
            assert gateway.usage["requests"]["active"]["now"] == 0
            await gateway.close()

        asyncio.run(main())


async def _waiting(gateway: StubGateway, body: Any, **headers: str) -> Call:
    """A request that has come as far as the engine that is not ready."""
    call = gateway.begin(body, **headers)
    async with asyncio.timeout(10):
        while not gateway.pool.leases:
            await asyncio.sleep(0.001)
    return call


def test_an_answer_within_the_first_second_keeps_its_status(tmp_path: Path) -> None:
    async def act(gateway: StubGateway, clock: FakeClock, ready: asyncio.Event) -> None:
        call = await _waiting(gateway, ASK)
        await clock.advance(0.9)
        assert call.answered.status == 0
        gateway.pool.refuses = None
        ready.set()
        answer = await call.answer()
        assert answer.json == completion()
        assert not answer.body.startswith(b" ")

    _cold(tmp_path, act)


def test_whitespace_at_once_and_every_five_seconds_then_json(tmp_path: Path) -> None:
    async def act(gateway: StubGateway, clock: FakeClock, ready: asyncio.Event) -> None:
        call = await _waiting(gateway, ASK)
        counts = []
        for seconds in (0.99, 0.01, 4.9, 0.1, 5, 5):
            await clock.advance(seconds)
            counts.append(len(call.answered.pieces))
        assert counts == [0, 1, 1, 2, 3, 4]
        assert call.answered.body == b" " * 4
        assert (call.answered.status, call.answered.headers["content-type"]) == (200, "application/json")
        ready.set()
        answer = await call.answer()
        assert answer.whole
        assert answer.json == completion()

    _cold(tmp_path, act)


def test_comments_every_five_seconds_in_a_stream(tmp_path: Path) -> None:
    usage = b'data: {"choices":[],"usage":{"prompt_tokens":2,"completion_tokens":1}}\n\n'
    events = [b'data: {"choices":[{"text":"b"}]}\n\n', 0.5, usage, b"data: [DONE]\n\n"]

    async def act(gateway: StubGateway, clock: FakeClock, ready: asyncio.Event) -> None:
        call = await _waiting(gateway, ASK | {"stream": True})
        await clock.advance(11)
        assert call.answered.pieces == [b": keepalive\n\n"] * 3
        ready.set()
        await call.until(lambda answer: len(answer.pieces) == 4)
        # Between two tokens too.
        await clock.advance(5)
        assert call.answered.pieces[-1] == b": keepalive\n\n"
        answer = await call.answer()
        assert [piece for piece in answer.pieces if not piece.startswith(b":")] == [events[0], events[-1]]

    _cold(tmp_path, act, Script(events, media="text/event-stream"))


@pytest.mark.parametrize("stream", [False, True])
def test_a_late_failure_stands_inside_the_200(stream: bool, tmp_path: Path) -> None:
    async def act(gateway: StubGateway, clock: FakeClock, ready: asyncio.Event) -> None:
        call = await _waiting(gateway, ASK | {"stream": stream})
        await clock.advance(2)
        ready.set()
        answer = await call.answer()
        assert (answer.status, answer.whole) == (200, True)
        error = json.loads(answer.pieces[-1].removeprefix(b"data: "))
        assert error["error"]["code"] == "engine_out_of_memory"
        assert error["request_id"] == answer.headers["x-request-id"]
        assert gateway.usage["usage"]["monthly_input_tokens"]["used"] == 0
        lines = (await gateway.get("/metrics", key=None)).body.decode()
        about = 'endpoint="/v1/completions",model="stub",status="200"'
        assert f'streamtap_requests_total{{code="engine_out_of_memory",{about}}} 1.0' in lines
        assert f'streamtap_requests_total{{code="",{about}}}' not in lines

    _cold(tmp_path, act, answers({"error": {"message": "oom", "code": "engine_out_of_memory"}}, status=500))


@pytest.mark.parametrize(
    ("refusal", "status"), [(EngineDead("it did not start."), 502), (CircuitOpen("it failed too often."), 503)]
)
def test_a_failure_within_the_first_second_keeps_its_status(refusal: Any, status: int, tmp_path: Path) -> None:
    async def act(gateway: StubGateway, clock: FakeClock, ready: asyncio.Event) -> None:
        gateway.pool.refuses = refusal
        answer = await gateway.ask(ASK)
        assert (answer.status, answer.code) == (status, refusal.code)
        assert int(answer.headers["retry-after"]) > 0
        assert gateway.usage["usage"]["monthly_input_tokens"]["used"] == 0

    _cold(tmp_path, act)


@pytest.mark.parametrize("stream", [False, True])
def test_the_deadline_of_fourteen_minutes(stream: bool, tmp_path: Path) -> None:
    async def act(gateway: StubGateway, clock: FakeClock, ready: asyncio.Event) -> None:
        call = await _waiting(gateway, ASK | {"stream": stream})
        await clock.advance(839.9)
        assert not call.task.done()
        await clock.advance(0.1)
        answer = await call.answer()
        assert (answer.status, answer.whole) == (200, True)
        assert len(answer.pieces) == 168 + 1
        error = json.loads(answer.pieces[-1].removeprefix(b"data: "))["error"]
        assert (error["code"], error["retryable"], error["retry_after_seconds"]) == ("modal_cold_boot", True, 30)
        assert gateway.usage["usage"]["monthly_input_tokens"]["used"] == 0
        assert gateway.pool.failures == []

    _cold(tmp_path, act)


def test_a_deadline_that_the_engine_let_pass_is_a_failure_of_the_engine(tmp_path: Path) -> None:
    async def act(gateway: StubGateway, clock: FakeClock, ready: asyncio.Event) -> None:
        ready.set()
        call = await _waiting(gateway, ASK)
        async with asyncio.timeout(10):
            while not gateway.pool.held:
                await asyncio.sleep(0.001)
        await clock.advance(840)
        assert json.loads((await call.answer()).body)["error"]["code"] == "modal_cold_boot"
        assert [type(each) for each in gateway.pool.failures] == [EngineUnreachable]

        left = await _waiting(gateway, ASK)
        async with asyncio.timeout(10):
            while not gateway.pool.held:
                await asyncio.sleep(0.001)
        left.leave()
        await left.answer()
        assert len(gateway.pool.failures) == 1

    _cold(tmp_path, act, Script([60.0]))


def test_the_deadline_before_anything_was_said_is_a_503(tmp_path: Path) -> None:
    async def main() -> None:
        from streamtap.server.config import Timing

        clock, pool = FakeClock(), StubPool()
        pool.cold = asyncio.Event()
        gateway = StubGateway(tmp_path, pool, clock=clock, timing=Timing(first_answer_seconds=60, deadline_seconds=30))
        call = await _waiting(gateway, ASK)
        await clock.advance(30)
        answer = await call.answer()
        assert (answer.status, answer.code, answer.headers["retry-after"]) == (503, "modal_cold_boot", "30")
        await gateway.close()

    asyncio.run(main())


def test_a_binary_answer_cannot_wait_for_a_start(tmp_path: Path) -> None:
    async def act(gateway: StubGateway, clock: FakeClock, ready: asyncio.Event) -> None:
        call = await _waiting(gateway, BINARY, **ACCEPT)
        await clock.advance(0.9)
        assert not call.task.done()
        await clock.advance(0.1)
        answer = await call.answer()
        assert (answer.status, answer.code, answer.headers["retry-after"]) == (503, "modal_cold_boot", "5")
        assert answer.headers["content-type"] == "application/json"

    _cold(tmp_path, act)


def test_a_binary_answer_waits_for_an_engine_that_works_on_it(tmp_path: Path) -> None:
    async def act(gateway: StubGateway, clock: FakeClock, ready: asyncio.Event) -> None:
        ready.set()
        call = await _waiting(gateway, BINARY, **ACCEPT)
        async with asyncio.timeout(10):
            while not gateway.pool.held:
                await asyncio.sleep(0.001)
        await clock.advance(10)
        assert call.answered.status == 0
        answer = await call.answer()
        assert answer.code == "capture_failed"

    _cold(tmp_path, act, Script([0.3, *answers(completion()).pieces]))


@pytest.mark.parametrize("seconds", [0.5, 12])
def test_a_client_that_leaves_while_it_waits_is_charged_nothing(seconds: float, tmp_path: Path) -> None:
    async def act(gateway: StubGateway, clock: FakeClock, ready: asyncio.Event) -> None:
        call = await _waiting(gateway, BINARY)
        await clock.advance(seconds)
        call.leave()
        await call.answer()
        assert not call.answered.whole
        assert gateway.usage["usage"]["monthly_activations"]["used"] == 0

    _cold(tmp_path, act)


def test_an_engine_that_is_there_and_slow_is_waited_for_in_the_same_way(tmp_path: Path) -> None:
    async def act(gateway: StubGateway, clock: FakeClock, ready: asyncio.Event) -> None:
        ready.set()
        call = await _waiting(gateway, ASK)
        await clock.advance(6)
        assert call.answered.pieces == [b" "] * 2
        assert (await call.answer()).json == completion()

    _cold(tmp_path, act, Script([0.5, *answers(completion()).pieces]))


def test_nothing_is_said_after_the_last_event() -> None:
    """A client that reads slowly holds the last piece up while somebody already wants to keep it patient."""
    sent: list[bytes] = []
    has_room = asyncio.Event()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await has_room.wait()
            sent.append(message["body"])

    async def main() -> None:
        reply = Reply(send, Trace("id", "/", "POST", 0.0), clock=FakeClock(), timing=Timing())
        reply.kind = "events"
        last = asyncio.ensure_future(reply.finish(DONE))
        await asyncio.sleep(0)
        patience = asyncio.ensure_future(reply.keep_alive())
        await asyncio.sleep(0)
        has_room.set()
        await asyncio.gather(last, patience)

    asyncio.run(main())
    assert sent == [DONE]
