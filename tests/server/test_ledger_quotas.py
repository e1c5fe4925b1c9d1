"""Quotas and budgets: reserved before, settled after, exact among threads, processes and gateways."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import pytest

from streamtap.errors import ActivationQuotaExceeded, BudgetExceeded, LimitReached, QueueFull
from streamtap.server.config import Limits
from streamtap.server.db import Database, request_rows
from streamtap.server.ledger import Grant, Ledger, Outcome, Ticket
from streamtap.server.ledger.keys import KeyLimits, Keys, NewKey

#: So that slots and rates are in nobody's way.
WIDE = {"max_active_per_key": 1000, "rate_per_minute": 0}


class Till:
    """One gateway's ledger, with a key."""

    def __init__(self, database: Database, moment: Any, made: NewKey | None = None, **limits: int) -> None:
        self.made = made or Keys(database).create("ada", user="lab")
        self.database = database
        self.ledger = Ledger(database, Limits(**{**WIDE, **limits}), gateway=f"gateway {id(self)}", now=moment)

    def admit(self, secret: str | None = None) -> Ticket:
        return self.ledger.admit(
            secret or self.made.secret, scope="completions", endpoint="completions", request_id="r"
        )

    def take(self, given: int = 1, wanted: int = 1, captures: int = 0, **more: Any) -> tuple[Ticket, Grant]:
        ticket = self.admit(more.pop("secret", None))
        amounts = {"input_tokens": given, "output_tokens": wanted, "activations": captures}
        return ticket, self.ledger.reserve(ticket, model="demo", **amounts, **more)

    def used(self, name: str) -> int:
        found: int = self.ledger.usage(self.made.record)["usage"][name]["used"]
        return found


def test_what_is_reserved_is_held_and_settled_to_what_was_used(database: Database, moment: Any) -> None:
    till = Till(database, moment)

    ticket, grant = till.take(100, 50, 1)

    assert grant == Grant(50, clamped=False)
    names = ("monthly_input_tokens", "daily_input_tokens", "user_monthly_input_tokens", "user_daily_input_tokens")
    assert [till.used(name) for name in names] == [100] * 4
    assert till.used("monthly_output_tokens") == till.used("user_daily_output_tokens") == 50
    assert till.ledger.settle(ticket, Outcome(200, None, 100, 7))
    assert [till.used(name) for name in names] == [100] * 4
    assert till.used("monthly_output_tokens") == till.used("user_daily_output_tokens") == 7
    assert till.used("monthly_activations") == 1


@pytest.mark.parametrize(
    ("outcome", "left"),
    [
        (Outcome(200, None, 10, 4), (10, 4, 1)),
        (Outcome(502, "engine_dead", 0, 0, refund=True), (0, 0, 0)),
        (Outcome(502, "engine_dead", 10, 4, refund=True), (0, 0, 0)),
        (Outcome(400, "steering_not_finite", 10, 0), (10, 0, 1)),
        (Outcome(499, None), (10, 20, 1)),
        (Outcome(499, None, 10), (10, 20, 1)),
        (Outcome(200, None, 12, 25), (12, 25, 1)),
    ],
)
def test_only_the_server_s_own_failures_are_given_back_and_once(
    database: Database, moment: Any, outcome: Outcome, left: tuple[int, int, int]
) -> None:
    till = Till(database, moment)
    ticket, _ = till.take(10, 20, 1)

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(lambda _: till.ledger.settle(ticket, outcome), range(8))) == 1

    names = ("monthly_input_tokens", "user_daily_output_tokens", "monthly_activations")
    assert tuple(till.used(name) for name in names) == left
    assert till.ledger.usage(till.made.record)["requests"]["active"]["now"] == 0


ENDS = [
    (Outcome(200, None, 10, 4), (10, 4, 1)),
    (Outcome(502, "engine_dead", 10, 4, refund=True), (0, 0, 0)),
    (Outcome(400, "steering_not_finite", 10, 0), (10, 0, 1)),
    (Outcome(499, None), (10, 20, 1)),
]


@pytest.mark.parametrize(("outcome", "left"), ENDS)
@pytest.mark.parametrize("late", [False, True])
def test_what_nothing_limits_is_charged_in_full_by_its_settlement(
    database: Database, moment: Any, late: bool, outcome: Outcome, left: tuple[int, int, int]
) -> None:
    till = Till(database, moment)
    asked = {"model": "demo", "input_tokens": 10, "output_tokens": 20, "activations": 1}

    ticket = till.ledger.unreserved(till.admit(), **asked)

    assert ticket is not None
    assert till.used("monthly_input_tokens") == 0
    if late:
        assert till.ledger.reserve(ticket, **asked) == Grant(20, clamped=False)
        assert till.used("monthly_input_tokens") == 10
    assert till.ledger.settle(ticket, outcome)
    assert not till.ledger.settle(ticket, outcome)
    names = ("monthly_input_tokens", "user_daily_output_tokens", "monthly_activations")
    assert tuple(till.used(name) for name in names) == left
    with database.reading() as connection:
        (row,) = request_rows.newest(connection, 10)
    assert (row.model, row.status, row.output_tokens) == ("demo", outcome.status, outcome.output_tokens)


@pytest.mark.parametrize(
    ("limits", "captures", "is_limited"),
    [
        ({}, 1, False),
        ({"monthly_activations": 5}, 1, True),
        ({"monthly_activations": 5}, 0, False),
        ({"user_daily_output_tokens": 5}, 0, True),
        ({"daily_input_tokens": 10**9}, 0, True),
    ],
)
def test_any_limit_on_what_is_asked_has_to_be_reserved(
    database: Database, moment: Any, limits: dict[str, int], captures: int, is_limited: bool
) -> None:
    till = Till(database, moment, **limits)

    ticket = till.ledger.unreserved(till.admit(), model="demo", input_tokens=1, output_tokens=1, activations=captures)

    assert (ticket is None) == is_limited


def test_a_limit_of_the_key_s_own_has_to_be_reserved(database: Database, moment: Any) -> None:
    made = Keys(database).create("bo", limits=KeyLimits(monthly_output_tokens=9))
    till = Till(database, moment, made)

    assert till.ledger.unreserved(till.admit(), model="m", input_tokens=1, output_tokens=1, activations=0) is None


def test_a_request_refused_before_it_reserved_uses_nothing(database: Database, moment: Any) -> None:
    till = Till(database, moment)

    assert till.ledger.settle(till.admit(), Outcome(400, "bad_json", 5, 5))

    assert till.used("monthly_input_tokens") == till.used("monthly_output_tokens") == 0


def test_of_50_requests_on_a_quota_of_10_exactly_10_pass_on_two_gateways(
    migrated_url: str, open_database: Callable[[str], Database], moment: Any
) -> None:
    first = Till(open_database(migrated_url), moment, monthly_activations=10)
    second = Till(open_database(migrated_url), moment, first.made, monthly_activations=10)

    def one(number: int) -> bool:
        till = (first, second)[number % 2]
        ticket = till.admit()
        try:
            till.ledger.reserve(ticket, model="demo", input_tokens=3, output_tokens=1, activations=1)
        except ActivationQuotaExceeded:
            return False
        return True

    with ThreadPoolExecutor(50) as pool:
        assert sum(pool.map(one, range(50))) == 10

    assert first.used("monthly_activations") == second.used("monthly_activations") == 10
    assert first.used("monthly_input_tokens") == 30, "those that were refused hold nothing"


TAKE_TWENTY = """
import sys
from streamtap.errors import ActivationQuotaExceeded
from streamtap.server.config import Limits
from streamtap.server.db import Database
from streamtap.server.ledger import Ledger, Outcome

url, secret, gateway = sys.argv[1:]
ledger = Ledger(Database.open(url), Limits(), gateway=gateway)
for i in range(20):
    ticket = ledger.admit(secret, scope="completions", endpoint="completions", request_id=str(i))
    try:
        ledger.reserve(ticket, model="demo", input_tokens=1, output_tokens=1, activations=1)
    except ActivationQuotaExceeded:
        ledger.settle(ticket, Outcome(429, "activation_quota_exceeded", refund=True))
    else:
        print("passed")
        ledger.settle(ticket, Outcome(200, None, 1, 1))
"""


def test_of_several_processes_on_a_quota_exactly_so_many_pass(database: Database, migrated_url: str) -> None:
    made = Keys(database).create("ada", limits=KeyLimits(monthly_activations=25, rate_per_minute=0))

    commands = [[sys.executable, "-c", TAKE_TWENTY, migrated_url, made.secret, f"process {i}"] for i in range(2)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    said = [process.communicate()[0] for process in running]

    assert [process.returncode for process in running] == [0, 0]
    assert sum(text.count("passed") for text in said) == 25


def test_the_quota_says_used_limit_and_when_it_turns(database: Database, moment: Any) -> None:
    till = Till(database, moment, monthly_activations=2)
    tickets = [till.take(captures=1)[0] for _ in range(2)]

    for refuse in (till.ledger.check_activation_quota, lambda ticket: till.take(captures=1)):
        with pytest.raises(ActivationQuotaExceeded, match=r"2/2 activations this month \(2026-11\)") as raised:
            refuse(tickets[0])
        assert raised.value.code == "activation_quota_exceeded"
        assert raised.value.retry_after_seconds == 12 * 3600
    till.take(captures=0)
    till.ledger.settle(tickets[0], Outcome(502, "engine_dead", refund=True))
    till.ledger.check_activation_quota(tickets[1])
    with pytest.raises(ActivationQuotaExceeded, match="1/2"):
        till.ledger.check_activation_quota(tickets[1], 2)


def test_quotas_of_zero_and_those_of_a_key_win_over_the_server_s(database: Database, moment: Any) -> None:
    till = Till(database, moment, monthly_activations=1)
    Keys(database).set("ada", monthly_activations=3)
    free = Keys(database).create("bo", limits=KeyLimits(monthly_activations=0)).secret
    for _ in range(3):
        till.take(captures=1)
        till.take(captures=1, secret=free)

    till.ledger.check_activation_quota(till.admit(free))
    till.take(captures=1, secret=free)
    with pytest.raises(ActivationQuotaExceeded, match="3/3"):
        till.take(captures=1)


LIMITS_OF_INPUT = [
    ("monthly_input_tokens", "this key has used 80/100 input tokens this month"),
    ("daily_input_tokens", "this key has used 80/100 input tokens today"),
    ("user_monthly_input_tokens", "this user has used 80/100 input tokens this month"),
    ("user_daily_input_tokens", "this user has used 80/100 input tokens today"),
]


@pytest.mark.parametrize(("name", "said"), LIMITS_OF_INPUT, ids=[name for name, _ in LIMITS_OF_INPUT])
def test_input_that_does_not_fit_is_refused_and_holds_nothing(
    database: Database, moment: Any, name: str, said: str
) -> None:
    till = Till(database, moment, **{name: 100})
    till.take(80, 5)

    with pytest.raises(BudgetExceeded, match=said) as raised:
        till.take(21, 5, 1)

    assert (raised.value.code, raised.value.retry_after_seconds) == ("budget_exceeded", 12 * 3600)
    assert (till.used("monthly_input_tokens"), till.used("monthly_output_tokens")) == (80, 5)
    assert till.used("monthly_activations") == 0
    assert till.take(20, 5)[1] == Grant(5, clamped=False)


OUTPUT = ["monthly_output_tokens", "daily_output_tokens", "user_monthly_output_tokens", "user_daily_output_tokens"]


@pytest.mark.parametrize("name", OUTPUT)
def test_output_is_lowered_to_what_is_left(database: Database, moment: Any, name: str) -> None:
    till = Till(database, moment, **{name: 100})

    assert till.take(1, 1000)[1] == Grant(100, clamped=True), "the first of the month"
    with pytest.raises(BudgetExceeded, match=r"has used 100/100 output tokens .* needs at least 1"):
        till.take(1, 10)
    assert till.take(1, 0)[1] == Grant(0, clamped=False), "what generates nothing needs nothing"
    assert till.used(name) == 100


def test_output_left_is_shared_evenly_by_sequences(database: Database, moment: Any) -> None:
    till = Till(database, moment, monthly_output_tokens=20)

    assert till.take(1, 6 * 10, sequences=6)[1] == Grant(18, clamped=True)
    with pytest.raises(BudgetExceeded, match="18/20 output tokens .* needs at least 3"):
        till.take(1, 30, sequences=3)
    assert till.take(1, 2, sequences=2)[1] == Grant(2, clamped=False)


def test_the_smallest_headroom_counts_and_unused_output_comes_back(database: Database, moment: Any) -> None:
    till = Till(database, moment, monthly_output_tokens=50, user_daily_output_tokens=30)

    ticket, grant = till.take(1, 40)
    assert grant == Grant(30, clamped=True)
    till.ledger.settle(ticket, Outcome(200, None, 1, 10))

    assert till.take(1, 40)[1] == Grant(20, clamped=True)


def test_a_budget_shared_by_a_user_s_keys_is_never_passed(
    migrated_url: str, open_database: Callable[[str], Database], moment: Any
) -> None:
    limits = {"user_monthly_output_tokens": 1000, "monthly_input_tokens": 70}
    first = Till(open_database(migrated_url), moment, **limits)
    other = Keys(first.database).create("bo", user="lab")
    second = Till(open_database(migrated_url), moment, other, **limits)

    def one(number: int) -> int:
        try:
            return (first, second)[number % 2].take(1 + number % 3, 30)[1].output_tokens
        except LimitReached:
            return 0

    with ThreadPoolExecutor(16) as pool:
        granted = list(pool.map(one, range(60)))

    assert sum(granted) == 1000, "33 of 30, and one of what is left"
    assert sorted(set(granted)) == [0, 10, 30]
    assert first.used("user_monthly_output_tokens") == second.used("user_monthly_output_tokens") == 1000


def test_after_a_storm_on_two_gateways_the_counters_are_what_the_log_says(
    migrated_url: str, open_database: Callable[[str], Database], moment: Any
) -> None:
    limits = {"user_monthly_output_tokens": 700, "max_active_per_key": 4, "max_waiting_per_key": 8}
    first = Till(open_database(migrated_url), moment, **limits)
    second = Till(open_database(migrated_url), moment, Keys(first.database).create("bo", user="lab"), **limits)

    def one(number: int) -> bool:
        # Each gateway serves both keys, some requests give up while they wait, and some fail.
        till, key = (first, second)[number % 2], (first, second)[number // 2 % 2].made.secret
        try:
            ticket = till.admit(key)
        except QueueFull:
            return True
        outcome = Outcome(200, None, 5, 3) if number % 3 else Outcome(502, "engine_dead", refund=True)
        try:
            if till.ledger.activate(ticket):
                till.ledger.reserve(ticket, model="demo", input_tokens=9, output_tokens=40, activations=number % 5)
            else:
                outcome = Outcome(499, None, 0, 0)
        except BudgetExceeded:
            outcome = Outcome(429, "budget_exceeded", 0, 0)
        return till.ledger.settle(ticket, outcome) and not till.ledger.sweep()

    with ThreadPoolExecutor(20) as pool:
        assert all(pool.map(one, range(160)))

    with first.database.reading() as connection:
        done = [row for row in request_rows.newest(connection, 1000) if row.status == 200]
    assert len(done) > 10
    assert first.used("user_monthly_input_tokens") == 5 * len(done)
    assert first.used("user_monthly_output_tokens") == 3 * len(done)
    for till in (first, second):
        found = till.ledger.usage(till.made.record)["requests"]
        assert (found["active"]["now"], found["waiting"]["now"]) == (0, 0)


def test_months_and_days_turn_over_in_utc(database: Database, moment: Any) -> None:
    till = Till(database, moment, monthly_activations=1, daily_input_tokens=10)
    moment.at = datetime(2026, 11, 30, 23, 59, 59, tzinfo=UTC)
    late, _ = till.take(10, 5, 1)
    with pytest.raises(ActivationQuotaExceeded) as raised:
        till.take(1, 1, 1)
    assert raised.value.retry_after_seconds == 1

    moment.forward(1)
    early, _ = till.take(10, 5, 1)

    assert (till.used("monthly_activations"), till.used("daily_input_tokens")) == (1, 10)
    assert till.ledger.settle(late, Outcome(502, "engine_dead", refund=True)), "in the month that it was reserved in"
    assert (till.used("monthly_activations"), till.used("daily_input_tokens")) == (1, 10)
    assert till.ledger.settle(early, Outcome(200, None, 4, 2))
    assert (till.used("monthly_activations"), till.used("daily_input_tokens")) == (1, 4)
    moment.forward(-1)
    assert (till.used("monthly_activations"), till.used("daily_input_tokens")) == (0, 0)
    moment.forward(24 * 3600)
    assert (till.used("daily_input_tokens"), till.used("monthly_input_tokens")) == (4, 4)


def test_the_log_has_counts_and_nothing_of_the_content(database: Database, moment: Any) -> None:
    till = Till(database, moment)
    ticket, _ = till.take(10, 20, 1)
    moment.forward(2.5)
    till.ledger.settle(ticket, Outcome(200, None, 10, 4, capture_bytes=4096, seconds=2.5))
    till.ledger.settle(till.admit(), Outcome(400, "bad_json"))

    with database.reading() as connection:
        refused, done = (row._asdict() for row in request_rows.newest(connection, 10))

    assert done == {
        "id": 1, "at": datetime(2026, 11, 30, 12, tzinfo=UTC), "request_id": "r", "key_prefix": till.made.record.prefix,
        "endpoint": "completions", "model": "demo", "input_tokens": 10, "output_tokens": 4, "status": 200, "code": None,
        "seconds": 2.5, "capture_bytes": 4096,
    }  # fmt: skip
    assert (refused["status"], refused["code"], refused["model"], refused["input_tokens"]) == (
        400,
        "bad_json",
        None,
        None,
    )
