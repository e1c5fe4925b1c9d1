"""Reservations that wait: made for requests that last, left out for short ones, counted once either way."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from streamtap.server.deferred import Deferred
from streamtap.testing.stub_engine import Script, StubEngine, StubPool, answers, completion
from streamtap.testing.stub_gateway import StubGateway

ASK = {"model": "stub", "prompt": "a", "max_tokens": 3}


def test_a_short_request_is_over_before_anything_is_reserved() -> None:
    made: list[str] = []

    async def reserve() -> None:
        made.append("reserved")

    async def main() -> None:
        deferred = Deferred(reserve)
        await deferred.end()
        await asyncio.sleep(0.1)

    asyncio.run(main())

    assert made == []


@pytest.mark.parametrize("error", [None, OSError("the database is gone")])
def test_a_request_that_lasts_is_reserved_and_its_end_waits_for_that(error: OSError | None) -> None:
    made: list[str] = []

    async def main() -> None:
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def reserve() -> None:
            begun.set()
            await go_on.wait()
            made.append("reserved")
            if error is not None:
                raise error

        deferred = Deferred(reserve)
        await begun.wait()
        ending = asyncio.ensure_future(deferred.end())
        await asyncio.sleep(0)
        assert not ending.done()
        go_on.set()
        await ending

    asyncio.run(main())

    assert made == ["reserved"]


def test_a_request_that_lasts_shows_what_it_holds_and_is_charged_once(tmp_path: Path) -> None:
    whole = answers(completion(completion_tokens=2)).pieces
    with StubEngine(lambda _body: Script([0.3, *whole])) as engine:

        async def main() -> None:
            gateway = StubGateway(tmp_path, StubPool(engine.base_url))

            def used() -> tuple[int, int]:
                usage: dict[str, Any] = gateway.usage["usage"]
                return usage["monthly_input_tokens"]["used"], usage["user_daily_output_tokens"]["used"]

            call = gateway.begin(ASK)
            async with asyncio.timeout(10):
                while used() != (2, 3):
                    assert not call.task.done()
                    await asyncio.sleep(0.01)
            assert (await call.answer()).status == 200
            assert used() == (2, 2)
            await gateway.close()

        asyncio.run(main())
