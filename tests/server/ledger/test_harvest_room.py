"""Whether a job has room, asked before anybody counts its tokens: what a submission says, and nothing is held."""

from __future__ import annotations

from typing import Any

import pytest

from streamtap.errors import HarvestCapacityExceeded, HarvestConcurrencyExceeded, HarvestQuotaExceeded, LimitReached
from streamtap.server.db import Database


def refusals(desk: Any, key: Any, lane: str) -> list[tuple[type[LimitReached], str]]:
    """What a look and a submission say."""
    found = []
    for ask in (lambda: desk.harvests.check_room(key, lane), lambda: desk.submit(key, lane=lane)):
        with pytest.raises(LimitReached) as raised:
            ask()
        found.append((type(raised.value), str(raised.value)))
    return found


def test_a_look_says_what_a_submission_would(desk_of: Any, database: Database) -> None:
    desk = desk_of(database, small_harvests_per_key=1, large_harvests=1, monthly_harvests=2)
    desk.submit(lane="small")
    look, submission = refusals(desk, desk.ada, "small")
    assert look == submission
    assert look[0] is HarvestConcurrencyExceeded

    desk.harvests.check_room(desk.ada, "large")
    desk.submit(lane="large")
    look, submission = refusals(desk, desk.bo, "large")
    assert look == submission
    assert look[0] is HarvestCapacityExceeded

    look, submission = refusals(desk, desk.ada, "small")
    assert look == submission
    assert look[0] is HarvestQuotaExceeded


def test_a_look_holds_nothing(desk_of: Any, database: Database) -> None:
    desk = desk_of(database, small_harvests_per_key=1)
    for _ in range(3):
        desk.harvests.check_room(desk.ada, "small")

    assert desk.slots() == {}
    assert not any(desk.used().values())
    desk.submit()


def test_tokens_are_not_looked_at(desk_of: Any, database: Database) -> None:
    desk = desk_of(database, daily_input_tokens=100)
    desk.submit(tokens=100)

    desk.harvests.check_room(desk.ada, "small")
    with pytest.raises(LimitReached, match="needs at least 1;"):
        desk.submit(tokens=1)
