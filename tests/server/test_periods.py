from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest

from streamtap.server.ledger.periods import next_start, period, seconds_left

LAST = datetime(2026, 12, 31, 23, 59, 59, 500_000, tzinfo=UTC)


def test_a_year_turns_over() -> None:
    assert (period("month", LAST), period("day", LAST)) == ("2026-12", "2026-12-31")
    assert next_start("month", LAST) == next_start("day", LAST) == datetime(2027, 1, 1, tzinfo=UTC)
    assert seconds_left("month", LAST) == 1


@pytest.mark.parametrize(("month", "days"), [(2, 28), (4, 30), (7, 31), (12, 31)])
def test_months_have_their_days(month: int, days: int) -> None:
    first = datetime(2026, month, 1, tzinfo=UTC)

    assert next_start("month", first) - first == timedelta(days=days)
    assert next_start("month", first + timedelta(days=days - 1)) == next_start("month", first)


def test_periods_are_utc_wherever_the_clock_hangs() -> None:
    east = datetime(2026, 12, 1, 1, 0, tzinfo=timezone(timedelta(hours=5)))

    assert (period("month", east), period("day", east)) == ("2026-11", "2026-11-30")
    assert next_start("day", east) == datetime(2026, 12, 1, tzinfo=UTC)
    assert seconds_left("month", east) == 4 * 3600
