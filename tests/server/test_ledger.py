"""Admission: the order of refusals, rates and slots."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from streamtap.errors import (
    InvalidKey,
    KeyDisabled,
    KeyRevoked,
    LimitReached,
    MissingAuthorization,
    QueueFull,
    RateLimited,
    ScopeDenied,
    ServerRestarting,
)
from streamtap.server.config import Limits
from streamtap.server.db import Database, counters
from streamtap.server.ledger import Ledger, Outcome, Ticket
from streamtap.server.ledger.keys import KeyLimits, Keys
from streamtap.server.ledger.periods import JUST_NOW

DONE = Outcome(200)


class Desk:
    """A ledger with one key, and short words for what is asked of it."""

    def __init__(self, database: Database, moment: Callable[..., object], limits: Limits | None = None) -> None:
        self.database = database
        self.keys = Keys(database)
        self.made = self.keys.create("ada")
        self.ledger = Ledger(database, limits or Limits(), gateway="first", now=moment)  # type: ignore[arg-type]

    def admit(self, secret: str | None = None, scope: str = "completions") -> Ticket:
        return self.ledger.admit(secret or self.made.secret, scope=scope, endpoint="completions", request_id="r")

    def slots(self) -> dict[str, int]:
        with self.database.reading() as connection:
            found = counters.read(connection, [f"key:{self.made.record.id}"], [JUST_NOW])
        return {counter.metric: used for counter, used in found.items()}


@pytest.fixture
def desk(database: Database, moment: Callable[..., object]) -> Desk:
    return Desk(database, moment)


def test_a_ticket_names_its_key_and_has_a_slot(desk: Desk) -> None:
    ticket = desk.admit()

    assert (ticket.key, ticket.active) == (desk.made.record, True)
    assert ticket.id != desk.admit().id
    assert desk.slots() == {"active": 2, "waiting": 0}


def test_no_key_and_unknown_keys_leave_no_rows(desk: Desk) -> None:
    with pytest.raises(MissingAuthorization):
        desk.ledger.admit(None, scope="completions", endpoint="completions", request_id="r")
    for unknown in ("stp_" + "x" * 51, desk.made.secret[:-1] + "-", "nonsense", "Bearer x"):
        with pytest.raises(InvalidKey):
            desk.admit(unknown)

    with desk.database.reading() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM starts").scalar() == 0
        assert connection.exec_driver_sql("SELECT count(*) FROM counters").scalar() == 0


def test_the_state_of_a_key_counts_from_the_next_request_on(desk: Desk) -> None:
    desk.admit()
    desk.keys.pause("ada")
    with pytest.raises(KeyDisabled):
        desk.admit()
    desk.keys.resume("ada")
    desk.admit()
    with pytest.raises(ScopeDenied):
        desk.admit(scope="harvest")
    desk.keys.revoke("ada")
    with pytest.raises(KeyRevoked):
        desk.admit()

    assert desk.slots()["active"] == 2


def test_the_81st_request_is_refused_and_a_settled_one_makes_room(desk: Desk) -> None:
    tickets = [desk.admit() for _ in range(80)]

    assert [ticket.active for ticket in tickets] == [True] * 16 + [False] * 64
    with pytest.raises(QueueFull, match=r"16 requests running and 64 waiting; it may have 16 and 64") as raised:
        desk.admit()
    assert (raised.value.code, raised.value.retry_after_seconds) == ("queue_full", 5)
    assert not desk.ledger.activate(tickets[16])
    desk.ledger.settle(tickets[20], DONE)  # left while it waited
    assert not desk.admit().active
    desk.ledger.settle(tickets[0], DONE)
    assert desk.admit().active, "the line is full, and a slot is free"
    assert desk.slots() == {"active": 16, "waiting": 64}


def test_a_freed_slot_is_for_those_that_wait(desk: Desk) -> None:
    tickets = [desk.admit() for _ in range(17)]
    desk.ledger.settle(tickets[0], DONE)

    newcomer = desk.admit()

    assert not newcomer.active
    assert desk.ledger.activate(tickets[16])
    assert desk.ledger.activate(tickets[16]), "asking again takes nothing more"
    assert not desk.ledger.activate(newcomer)
    assert desk.slots() == {"active": 16, "waiting": 1}


def test_slots_are_a_key_s_own(desk: Desk) -> None:
    bo = desk.keys.create("bo", limits=KeyLimits(max_active=1, max_waiting=0)).secret
    for _ in range(80):
        desk.admit()

    assert desk.admit(bo).active
    with pytest.raises(QueueFull, match="1 requests running and 0 waiting; it may have 1 and 0"):
        desk.admit(bo)


def test_exactly_the_slots_are_given_to_many_threads(desk: Desk) -> None:
    def one(_: int) -> str:
        try:
            return "active" if desk.admit().active else "waiting"
        except QueueFull:
            return "full"

    with ThreadPoolExecutor(20) as pool:
        given = list(pool.map(one, range(100)))

    assert (given.count("active"), given.count("waiting"), given.count("full")) == (16, 64, 20)
    assert desk.slots() == {"active": 16, "waiting": 64}


def test_a_free_slot_goes_to_one_of_many_that_wait(desk: Desk) -> None:
    tickets = [desk.admit() for _ in range(40)]
    for ticket in tickets[:3]:
        desk.ledger.settle(ticket, DONE)

    with ThreadPoolExecutor(12) as pool:
        assert sum(pool.map(desk.ledger.activate, tickets[16:])) == 3

    assert desk.slots() == {"active": 16, "waiting": 21}


def test_after_a_storm_nothing_is_held(desk: Desk) -> None:
    def one(_: int) -> bool:
        ticket = desk.admit()
        while not desk.ledger.activate(ticket):
            pass
        return desk.ledger.settle(ticket, DONE) and not desk.ledger.settle(ticket, DONE)

    with ThreadPoolExecutor(24) as pool:
        assert all(pool.map(one, range(72)))

    assert desk.slots() == {"active": 0, "waiting": 0}


def test_a_key_starts_so_many_requests_a_minute(database: Database, moment: Callable[..., object]) -> None:
    desk = Desk(database, moment, Limits(rate_per_minute=3))
    other = desk.keys.create("bo").secret
    for _ in range(3):
        desk.ledger.settle(desk.admit(), DONE)

    with pytest.raises(RateLimited, match="started 3 requests in this minute") as raised:
        desk.admit()

    assert (raised.value.code, raised.value.retry_after_seconds) == ("rate_limited", 60)
    assert desk.admit(other).active
    moment.forward(60)  # type: ignore[attr-defined]
    assert desk.admit().active


def test_the_rate_is_asked_before_the_key_and_counts_refused_starts(
    database: Database, moment: Callable[..., object]
) -> None:
    desk = Desk(database, moment, Limits(rate_per_minute=2))
    desk.keys.pause("ada")

    for expected in (KeyDisabled, KeyDisabled, RateLimited):
        with pytest.raises(expected):
            desk.admit()


def test_rates_are_exact_and_a_key_may_have_its_own(database: Database, moment: Callable[..., object]) -> None:
    desk = Desk(database, moment, Limits(rate_per_minute=1))
    desk.keys.set("ada", rate_per_minute=25)

    def one(_: int) -> bool:
        try:
            return bool(desk.admit())
        except RateLimited:
            return False

    with ThreadPoolExecutor(10) as pool:
        assert sum(pool.map(one, range(40))) == 25
    desk.keys.set("ada", rate_per_minute=0)
    assert sum(one(i) for i in range(30)) == 30


def test_rates_hold_where_clocks_differ(
    database: Database, moment: Callable[..., object], open_database: Callable[[str], Database]
) -> None:
    desk = Desk(database, moment, Limits(rate_per_minute=2))
    moment.forward(-1)  # type: ignore[attr-defined]
    desk.admit()
    moment.forward(1)  # type: ignore[attr-defined]
    desk.admit()
    moment.forward(-1)  # type: ignore[attr-defined]
    desk.admit()  # a gateway whose clock is in the minute before

    with pytest.raises(RateLimited):
        desk.admit()


def test_authenticate_takes_no_slot_and_counts_no_start(database: Database, moment: Callable[..., object]) -> None:
    desk = Desk(database, moment, Limits(rate_per_minute=1))

    for _ in range(3):
        assert desk.ledger.authenticate(desk.made.secret, "completions") == desk.made.record
        assert desk.ledger.authenticate(desk.made.secret, None) == desk.made.record

    with pytest.raises(ScopeDenied):
        desk.ledger.authenticate(desk.made.secret, "admin")
    with pytest.raises(InvalidKey):
        desk.ledger.authenticate("stp_nothing", None)
    assert desk.slots() == {}
    desk.admit()


def test_a_ticket_that_was_given_up_says_so(desk: Desk) -> None:
    tickets = [desk.admit() for _ in range(17)]
    desk.ledger.settle(tickets[16], DONE)
    desk.ledger.settle(tickets[0], DONE)

    with pytest.raises(ServerRestarting, match="send it again") as raised:
        desk.ledger.activate(tickets[16])
    assert raised.value.retry_after_seconds == 5
    with pytest.raises(ServerRestarting):
        desk.ledger.reserve(tickets[0], model="m", input_tokens=1, output_tokens=1, activations=1)
    assert desk.ledger.usage(desk.made.record)["usage"]["monthly_activations"]["used"] == 0


def test_every_limit_says_when_to_come_back(database: Database, moment: Callable[..., object]) -> None:
    desk = Desk(database, moment, Limits(max_active_per_key=1, max_waiting_per_key=0, rate_per_minute=2))
    desk.admit()
    for _ in range(2):
        with pytest.raises(LimitReached) as raised:
            desk.admit()
        assert raised.value.retryable
        assert isinstance(raised.value.retry_after_seconds, int)
