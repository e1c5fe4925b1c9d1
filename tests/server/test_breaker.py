from __future__ import annotations

import asyncio

import pytest

from streamtap.errors import CircuitOpen
from streamtap.server.pool.breaker import Breaker
from streamtap.testing.fake_clock import FakeClock


def _breaker(clock: FakeClock) -> Breaker:
    return Breaker("the engine of 'm'", clock, failures=3, seconds=60)


def test_failures_in_a_row_open_it_and_time_closes_it() -> None:
    clock = FakeClock()
    breaker = _breaker(clock)
    for _ in range(3):
        breaker.check()
        breaker.failed()

    clock.shift(10.5)
    with pytest.raises(CircuitOpen, match="'m' failed 3 times in a row .* send the request again in 50 s") as caught:
        breaker.check()
    assert caught.value.retry_after_seconds == 50
    clock.shift(49.5)
    breaker.check()


def test_a_success_in_between_starts_the_count_again() -> None:
    breaker = _breaker(FakeClock())
    for _ in range(2):
        breaker.failed()
        breaker.failed()
        breaker.succeeded()
    assert not breaker.is_open


def test_the_first_failure_after_the_time_opens_it_again() -> None:
    clock = FakeClock()
    breaker = _breaker(clock)
    for _ in range(3):
        breaker.failed()
    clock.shift(60)
    breaker.failed()
    assert breaker.is_open
    clock.shift(60)
    breaker.succeeded()
    breaker.failed()
    assert not breaker.is_open


def test_a_success_closes_it_at_once() -> None:
    breaker = _breaker(FakeClock())
    for _ in range(3):
        breaker.failed()
    breaker.succeeded()
    asyncio.run(_passes(breaker))


async def _passes(breaker: Breaker) -> None:
    breaker.check()
    assert not breaker.is_open
