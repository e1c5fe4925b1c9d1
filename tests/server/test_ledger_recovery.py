"""What a gateway held that was killed is given back, and nobody else's."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from streamtap.server.config import Limits
from streamtap.server.db import Database, request_rows
from streamtap.server.ledger import Ledger, Outcome, Ticket
from streamtap.server.ledger.keys import Keys, NewKey


@pytest.fixture
def made(database: Database) -> NewKey:
    return Keys(database).create("ada")


@pytest.fixture
def start(database: Database, moment: Any) -> Callable[..., Ledger]:
    def start_gateway(gateway: str, owner: str = "") -> Ledger:
        return Ledger(database, Limits(), gateway=gateway, owner=owner, now=moment)

    return start_gateway


def _run(ledger: Ledger, made: NewKey) -> Ticket:
    ticket = ledger.admit(made.secret, scope="completions", endpoint="completions", request_id="r")
    ledger.reserve(ticket, model="demo", input_tokens=10, output_tokens=20, activations=1)
    return ticket


def _held(ledger: Ledger, made: NewKey) -> tuple[int, int, int]:
    found = ledger.usage(made.record)
    usage = found["usage"]
    return (
        found["requests"]["active"]["now"],
        usage["monthly_activations"]["used"],
        usage["user_daily_input_tokens"]["used"],
    )


def test_a_successor_gives_back_what_was_held_at_once(start: Callable[..., Ledger], made: NewKey) -> None:
    killed = start("one", "here:/data")
    _run(killed, made)
    killed.admit(made.secret, scope="completions", endpoint="completions", request_id="r")

    successor = start("two", "here:/data")

    assert _held(successor, made) == (0, 0, 0)


def test_a_gateway_of_another_owner_is_left_alone_until_it_was_silent_for_a_minute(
    start: Callable[..., Ledger], made: NewKey, moment: Any
) -> None:
    silent, other = start("one", "here:/a"), start("two", "here:/b")
    _run(silent, made)
    kept = _run(other, made)
    moment.forward(59)
    assert other.sweep() == 0
    moment.forward(2)

    assert other.sweep() == 1

    assert _held(other, made) == (1, 1, 10)
    assert other.sweep() == 0
    assert other.settle(kept, Outcome(200, None, 10, 1))


def test_a_heartbeat_keeps_a_gateway_s_requests(start: Callable[..., Ledger], made: NewKey, moment: Any) -> None:
    slow, other = start("one"), start("two")
    ticket = _run(slow, made)
    for _ in range(10):
        moment.forward(30)
        slow.heartbeat()
        assert other.sweep() == 0

    assert slow.settle(ticket, Outcome(200, None, 10, 5))


def test_what_was_swept_is_not_settled_again(start: Callable[..., Ledger], made: NewKey, moment: Any) -> None:
    silent, other = start("one"), start("two")
    ticket = _run(silent, made)
    moment.forward(100)
    other.sweep()

    assert not silent.settle(ticket, Outcome(200, None, 10, 5))
    assert _held(other, made) == (0, 0, 0)


def test_a_gateway_that_was_forgotten_and_goes_on_is_known_again(
    start: Callable[..., Ledger], made: NewKey, moment: Any
) -> None:
    silent, other = start("one"), start("two")
    moment.forward(100)
    other.sweep()
    late = _run(silent, made)
    assert other.sweep() == 0, "young as it is, its gateway may yet be heard of"
    silent.heartbeat()
    moment.forward(59)

    assert other.sweep() == 0
    assert silent.settle(late, Outcome(200, None, 10, 5))


def test_requests_of_a_gateway_nobody_knows_are_swept_when_old(
    start: Callable[..., Ledger], made: NewKey, moment: Any
) -> None:
    silent, other = start("one"), start("two")
    moment.forward(100)
    other.sweep()
    _run(silent, made)
    moment.forward(61)

    assert other.sweep() == 1
    assert _held(other, made) == (0, 0, 0)


def test_several_that_sweep_at_once_give_back_once(start: Callable[..., Ledger], made: NewKey, moment: Any) -> None:
    silent, others = start("one"), [start(f"other {i}") for i in range(4)]
    for _ in range(5):
        _run(silent, made)
    moment.forward(100)
    for other in others:
        other.heartbeat()

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(lambda ledger: ledger.sweep(), others)) == 5

    assert _held(others[0], made) == (0, 0, 0)


def test_a_swept_request_is_logged_as_lost(
    start: Callable[..., Ledger], made: NewKey, database: Database, moment: Any
) -> None:
    _run(start("one"), made)
    moment.forward(100)
    start("two")

    with database.reading() as connection:
        (row,) = request_rows.newest(connection, 10)

    assert (row.status, row.code, row.model) == (503, "server_restarting", "demo")


def test_a_gateway_that_closes_holds_nothing(start: Callable[..., Ledger], made: NewKey) -> None:
    closing, other = start("one"), start("two")
    _run(closing, made)
    kept = _run(other, made)

    closing.close()

    assert _held(other, made) == (1, 1, 10)
    assert other.settle(kept, Outcome(200, None, 10, 1))
