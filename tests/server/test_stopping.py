"""A gateway that stops: nothing new, and a time for what runs."""

from __future__ import annotations

import asyncio
from pathlib import Path

from streamtap.server.stopping import Stopping
from streamtap.testing.fake_clock import FakeClock
from streamtap.testing.stub_engine import Script, StubEngine, StubPool, answers, completion
from streamtap.testing.stub_gateway import StubGateway

ASK = {"prompt": "a", "max_tokens": 1}


def test_what_runs_ends_and_what_comes_is_refused(tmp_path: Path) -> None:
    with StubEngine(lambda _body: Script([0.3, *answers(completion()).pieces])) as engine:

        async def main() -> None:
            gateway = StubGateway(tmp_path, StubPool(engine.base_url))
            running = gateway.begin(ASK)
            async with asyncio.timeout(10):
                while not gateway.pool.held:
                    await asyncio.sleep(0.001)
            draining = asyncio.ensure_future(gateway.app.state.service.stopping.drain(30))
            await asyncio.sleep(0)

            late = await gateway.ask(ASK)
            health = await gateway.get("/health", key=None)

            assert (late.status, late.code) == (503, "server_restarting")
            assert int(late.headers["retry-after"]) > 0
            assert (health.status, health.json["status"]) == (503, "stopping")
            assert not draining.done()
            assert (await running.answer()).json == completion()
            await draining
            await gateway.close()

        asyncio.run(main())


def test_what_runs_too_long_is_told_so_and_charged_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        clock, pool = FakeClock(), StubPool()
        pool.cold = asyncio.Event()
        gateway = StubGateway(tmp_path, pool, clock=clock)
        early, late = gateway.begin(ASK), gateway.begin(ASK | {"stream": True})
        async with asyncio.timeout(10):
            while len(pool.leases) < 2:
                await asyncio.sleep(0.001)
        draining = asyncio.ensure_future(gateway.app.state.service.stopping.drain(30))
        await clock.advance(29)
        assert not early.task.done()
        await clock.advance(1)

        answer = await early.answer()
        assert answer.code == "server_restarting"
        assert b"server_restarting" in (await late.answer()).pieces[-1]
        await draining
        assert gateway.usage["usage"]["monthly_input_tokens"]["used"] == 0
        await gateway.close()

    asyncio.run(main())


def test_the_person_who_stops_it_is_told_what_it_waits_for() -> None:
    stopping = Stopping(FakeClock())
    assert stopping.waits_for(30) is None
    with stopping.counted():
        assert stopping.waits_for(30.0) == "Waiting up to 30 s for 1 request; Ctrl-C again stops now."
        with stopping.counted():
            assert stopping.waits_for(0.5) == "Waiting up to 0.5 s for 2 requests; Ctrl-C again stops now."


def test_nothing_runs(tmp_path: Path) -> None:
    async def main() -> None:
        gateway = StubGateway(tmp_path, StubPool())
        await asyncio.wait_for(gateway.app.state.service.stopping.drain(30), 5)
        await gateway.close()

    asyncio.run(main())
