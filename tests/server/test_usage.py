from __future__ import annotations

import json
from typing import Any

from streamtap.server.config import Limits
from streamtap.server.db import Database
from streamtap.server.ledger import Ledger, Outcome
from streamtap.server.ledger.keys import KeyLimits, Keys


def test_usage_tells_what_is_used_and_left(database: Database, moment: Any) -> None:
    keys = Keys(database)
    made = keys.create(
        "ada", user="ada@lab", scopes=["completions", "harvest"], limits=KeyLimits(monthly_activations=5)
    )
    limits = Limits(max_active_per_key=1, user_daily_output_tokens=100)
    ledger = Ledger(database, limits, gateway="one", now=moment)
    tickets = [ledger.admit(made.secret, scope="completions", endpoint="completions", request_id="r") for _ in range(3)]
    ledger.reserve(tickets[0], model="demo", input_tokens=7, output_tokens=30, activations=1)

    found = ledger.usage(made.record)

    usage = found.pop("usage")
    assert found == {
        "key": made.record.prefix, "name": "ada", "user": "ada@lab", "scopes": ["completions", "harvest"],
        "month": "2026-11", "month_ends_at": "2026-12-01T00:00:00+00:00",
        "day": "2026-11-30", "day_ends_at": "2026-12-01T00:00:00+00:00",
        "requests": {"active": {"now": 1, "limit": 1}, "waiting": {"now": 2, "limit": 64}},
        "rate_per_minute": 600,
    }  # fmt: skip
    assert usage["monthly_activations"] == {"used": 1, "limit": 5, "remaining": 4}
    assert usage["user_daily_output_tokens"] == {"used": 30, "limit": 100, "remaining": 70}
    assert usage["monthly_input_tokens"] == {"used": 7, "limit": None, "remaining": None}
    assert made.secret not in json.dumps(usage)


def test_a_key_that_was_never_used_has_everything_left(database: Database, moment: Any) -> None:
    made = Keys(database).create("ada")
    found = Ledger(database, Limits(monthly_activations=9, rate_per_minute=0), gateway="one", now=moment).usage(
        made.record
    )

    assert found["usage"]["monthly_activations"] == {"used": 0, "limit": 9, "remaining": 9}
    assert {line["used"] for line in found["usage"].values()} == {0}
    assert found["rate_per_minute"] is None


def test_a_limit_that_was_lowered_leaves_nothing_and_no_less(database: Database, moment: Any) -> None:
    made = Keys(database).create("ada")
    ledger = Ledger(database, Limits(monthly_input_tokens=10), gateway="one", now=moment)
    ticket = ledger.admit(made.secret, scope="completions", endpoint="completions", request_id="r")
    ledger.reserve(ticket, model="demo", input_tokens=8, output_tokens=1, activations=0)
    ledger.settle(ticket, Outcome(200, None, 8, 1))

    lowered = Keys(database).set("ada", monthly_input_tokens=5)

    assert ledger.usage(lowered)["usage"]["monthly_input_tokens"] == {"used": 8, "limit": 5, "remaining": 0}


def test_keys_of_one_user_share_the_user_s_lines(database: Database, moment: Any) -> None:
    keys = Keys(database)
    first, second = keys.create("ada", user="lab"), keys.create("bo", user="lab")
    ledger = Ledger(database, Limits(), gateway="one", now=moment)
    for made, count in ((first, 3), (second, 4)):
        ticket = ledger.admit(made.secret, scope="completions", endpoint="completions", request_id="r")
        ledger.reserve(ticket, model="demo", input_tokens=count, output_tokens=1, activations=0)

    usage = ledger.usage(first.record)["usage"]

    assert (usage["monthly_input_tokens"]["used"], usage["user_monthly_input_tokens"]["used"]) == (3, 7)
