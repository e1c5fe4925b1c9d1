"""GET /v1/harvest/{job_id}?wait=: who waits, for how long, and what ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

With = Callable[..., None]


@pytest.mark.parametrize("wait", ["61", "-1", "soon", "1e2", "", "NaN", "inf", "1_0", " 1", "60.1", "9" * 400, "1e999"])
def test_a_wait_out_of_bounds(wait: str, with_gateway: With) -> None:
    async def act(gateway: Any) -> None:
        job_id = await gateway.new_job()
        answer = await gateway.get(f"/v1/harvest/{job_id}?wait={wait}")
        assert (answer.status, answer.code) == (400, "invalid_request")
        assert "wait must be a number of seconds from 0 to 60" in answer.json["error"]["message"]

    with_gateway(act)


def test_a_wait_ends_with_the_job(with_gateway: With) -> None:
    async def act(gateway: Any) -> None:
        job_id = await gateway.new_job()
        calls = [gateway.call(f"/v1/harvest/{job_id}?wait=60") for _ in range(2)]
        await asyncio.sleep(0.3)
        assert all(not call.task.done() for call in calls)

        gateway.done()

        async with asyncio.timeout(20):
            for answer in [await call.answer() for call in calls]:
                assert answer.status == 200
                assert answer.json["status"] == "done"
                assert answer.json["result"]["manifest_url"]
        assert (await gateway.get(f"/v1/harvest/{job_id}?wait=60")).json["status"] == "done"

    with_gateway(act)


def test_a_wait_ends_with_its_time(with_gateway: With) -> None:
    async def act(gateway: Any) -> None:
        job_id = await gateway.new_job()
        begun = asyncio.get_running_loop().time()
        assert (await gateway.get(f"/v1/harvest/{job_id}?wait=0")).json["status"] == "pending"
        answer = await gateway.get(f"/v1/harvest/{job_id}?wait=4e-1")

        assert (answer.status, answer.json["status"]) == (200, "pending")
        assert 0.4 <= asyncio.get_running_loop().time() - begun < 20
        assert "x-streamtap-longpoll" not in answer.headers

    with_gateway(act)


async def declined(gateway: Any, address: str, key: str = "") -> Any:
    """The first answer to one who may not wait, once as many wait as may."""
    async with asyncio.timeout(20):
        while "x-streamtap-longpoll" not in (answer := await gateway.get(f"{address}?wait=0.01", key=key)).headers:
            pass
        return answer


async def let_in(gateway: Any, address: str, key: str = "") -> None:
    """Return once one more may wait."""
    async with asyncio.timeout(20):
        while "x-streamtap-longpoll" in (await gateway.get(f"{address}?wait=0.01", key=key)).headers:
            pass


def test_a_few_wait_and_the_others_are_told_at_once(with_gateway: With) -> None:
    async def act(gateway: Any) -> None:
        keys = [gateway.key, *(gateway.keys.create(name, scopes=["harvest"]).secret for name in ("b", "c"))]
        jobs = [(await gateway.submit(key=key)).json["job_id"] for key in keys]
        first, second, third = (f"/v1/harvest/{job_id}" for job_id in jobs)
        waiting = [gateway.call(f"{first}?wait=60") for _ in range(4)]

        of_key = await declined(gateway, first)
        assert (of_key.status, of_key.json["status"]) == (200, "pending")
        assert (of_key.headers["x-streamtap-longpoll"], of_key.headers["retry-after"]) == ("declined", "5")
        await let_in(gateway, second, keys[1])

        waiting += [gateway.call(f"{second}?wait=60", key=keys[1]) for _ in range(4)]
        await declined(gateway, third, keys[2])

        # One that leaves makes room.
        waiting[0].leave()
        await let_in(gateway, third, keys[2])
        assert all(not call.task.done() for call in waiting[1:])
        for call in waiting:
            call.leave()
        await asyncio.wait([call.task for call in waiting])

    with_gateway(act)


def test_a_server_that_stops_lets_nobody_wait(with_gateway: With) -> None:
    async def act(gateway: Any) -> None:
        job_id = await gateway.new_job()
        call = gateway.call(f"/v1/harvest/{job_id}?wait=60")
        await asyncio.sleep(0.3)
        assert not call.task.done()

        await gateway.app.state.service.stopping.drain(20)

        answer = await call.answer()
        assert (answer.status, answer.json["status"]) == (200, "pending")

    with_gateway(act)
