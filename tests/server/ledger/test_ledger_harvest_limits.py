"""What bulk jobs may hold: of a lane, of a month, of a budget; exact among many threads and gateways."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from streamtap.errors import (
    BudgetExceeded,
    HarvestCapacityExceeded,
    HarvestConcurrencyExceeded,
    HarvestQuotaExceeded,
    LimitReached,
)
from streamtap.server.config import Limits
from streamtap.server.db import Database
from streamtap.server.harvests.jobs import JobAsked
from streamtap.server.ledger.harvests import Harvests
from streamtap.server.ledger.keys import KeyLimits, Keys


def test_each_lane_of_a_key_has_its_own_room(desk: Any) -> None:
    jobs = [desk.submit() for _ in range(3)]
    desk.submit(lane="large")

    with pytest.raises(
        HarvestConcurrencyExceeded, match=r"has 3 harvest jobs of small models under way, and may have 3"
    ) as raised:
        desk.submit()
    assert (raised.value.code, raised.value.retry_after_seconds) == ("harvest_concurrency_exceeded", 30)
    with pytest.raises(HarvestConcurrencyExceeded, match=r"has 1 harvest jobs of large models"):
        desk.submit(lane="large")
    desk.submit(desk.bo)
    desk.harvests.cancel(desk.ada, jobs[1].id)
    desk.submit()
    assert desk.used()["monthly_harvests"] == 5, "what was refused is not counted"


def test_large_jobs_of_all_keys_have_room_for_two(desk: Any) -> None:
    cy = desk.keys.create("cy").record
    desk.submit(lane="large")
    desk.submit(desk.bo, lane="large")

    with pytest.raises(HarvestCapacityExceeded, match="2 harvest jobs of large models are under way") as raised:
        desk.submit(cy, lane="large")
    assert raised.value.retry_after_seconds == 30
    assert desk.used(cy) == {"monthly_harvests": 0, "monthly_input_tokens": 0, "daily_input_tokens": 0}
    desk.submit(cy)


def test_a_month_has_so_many_jobs_and_a_key_may_have_its_own_number(
    database: Database, desk_of: Any, moment: Any
) -> None:
    desk = desk_of(database, monthly_harvests=2)
    for _ in range(2):
        desk.harvests.cancel(desk.ada, desk.submit().id)

    with pytest.raises(HarvestQuotaExceeded, match=r"has used 2/2 harvests this month \(2026-11\)") as raised:
        desk.submit()
    assert raised.value.retry_after_seconds == 12 * 3600
    desk.keys.set("ada", monthly_harvests=3)
    desk.submit(desk.keys.get("ada"))
    desk.keys.set("ada", monthly_harvests=0)
    desk.submit(desk.keys.get("ada"))
    moment.forward(86400)
    desk.submit()


def test_tokens_come_out_of_the_key_s_and_the_user_s_budget(database: Database, desk_of: Any) -> None:
    desk = desk_of(database, monthly_input_tokens=250, user_daily_input_tokens=240)
    both = [desk.keys.create(name, user="team").record for name in ("c", "d")]
    desk.submit(both[0], tokens=200)

    with pytest.raises(BudgetExceeded, match="this key has used 200/250 input tokens this month") as raised:
        desk.submit(both[0], tokens=60)
    assert raised.value.code == "budget_exceeded"
    with pytest.raises(BudgetExceeded, match="this user has used 200/240 input tokens today"):
        desk.submit(both[1], tokens=60)
    assert desk.used(both[1]) == {"monthly_harvests": 0, "monthly_input_tokens": 0, "daily_input_tokens": 0}
    assert len(desk.harvests.jobs(both[1])) == 0
    desk.submit(both[1], tokens=40)


def test_one_that_is_larger_than_any_budget_is_refused(database: Database, desk_of: Any) -> None:
    desk = desk_of(database, daily_input_tokens=50)

    with pytest.raises(BudgetExceeded, match="has used 0/50 input tokens today .* needs at least 100"):
        desk.submit()


def test_limits_are_exact_among_many_threads(database: Database, desk_of: Any) -> None:
    desk = desk_of(database, small_harvests_per_key=7, monthly_input_tokens=650)

    def one(_: int) -> str:
        try:
            return str(desk.submit().id)
        except LimitReached as error:
            return error.code

    with ThreadPoolExecutor(12) as pool:
        given = list(pool.map(one, range(30)))

    codes = {code: given.count(code) for code in ("harvest_concurrency_exceeded", "budget_exceeded")}
    assert codes == {"harvest_concurrency_exceeded": 0, "budget_exceeded": 24}
    assert desk.used() == {"monthly_harvests": 6, "monthly_input_tokens": 600, "daily_input_tokens": 600}
    assert desk.slots() == {("ada", "harvest_small"): 6, ("all", "harvest_small"): 6}


def test_two_gateways_hold_the_limits_together(
    migrated_url: str, open_database: Callable[[str], Database], desk_of: Any, moment: Any
) -> None:
    first, limits = desk_of(open_database(migrated_url)), Limits()
    second = Harvests(open_database(migrated_url), limits, now=moment)
    for _ in range(3):
        first.submit()

    with pytest.raises(HarvestConcurrencyExceeded):
        second.submit(first.ada, JobAsked("tiny", "small", 1, 1, 1, (0,)))
    assert len(second.jobs(first.ada)) == 3


def test_a_key_s_limit_of_jobs_stands_in_its_record(database: Database) -> None:
    made = Keys(database).create("ada", limits=KeyLimits(monthly_harvests=5)).record

    assert made.limits.monthly_harvests == 5
