"""Counters, changed where they lie: a limit and the count that it is for are compared and moved in one statement.

Rows are always sent in one order, so that two transactions never wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from typing import NamedTuple

from sqlalchemy import Connection, bindparam, select, text

from streamtap.server.db.prepared import Prepared
from streamtap.server.db.tables import UNLIMITED, counters


class CounterId(NamedTuple):
    """Which counter: of whom, in which period, of what."""

    subject: str
    period: str
    metric: str


class Amount(NamedTuple):
    """So much more on a counter, as long as it stays within the ceiling."""

    counter: CounterId
    amount: int
    ceiling: int = UNLIMITED


_SET = (
    "INSERT INTO counters (subject, period, metric, used, ceiling) VALUES {rows} ON CONFLICT (subject, period, metric) "
)
_HOLD = (
    "DO UPDATE SET used = counters.used + excluded.used, ceiling = excluded.ceiling "
    "WHERE counters.used + excluded.used <= excluded.ceiling RETURNING subject, period, metric"
)
_CHANGE = "DO UPDATE SET used = counters.used + excluded.used RETURNING subject, period, metric, used"
_READ = select(counters.c.subject, counters.c.period, counters.c.metric, counters.c.used).where(
    counters.c.subject.in_(bindparam("subjects", expanding=True)),
    counters.c.period.in_(bindparam("periods", expanding=True)),
)


def hold(connection: Connection, amounts: Iterable[Amount]) -> set[CounterId]:
    """Add each amount that fits under its ceiling, in one statement; gives the counters that took theirs.

    The others are locked by it all the same, on both databases.
    """
    # A counter that is not there yet takes the first amount without a comparison.
    fitting = [amount for amount in amounts if amount.amount <= amount.ceiling]
    if not fitting:
        return set()
    rows = _statement(_HOLD, len(fitting)).rows(connection, _values(fitting))
    return {CounterId(*row) for row in rows}


def change(connection: Connection, changes: Mapping[CounterId, int]) -> dict[CounterId, int]:
    """Add to counters, or take away, in one statement; gives what each then holds."""
    if not changes:
        return {}
    amounts = [Amount(counter, amount) for counter, amount in changes.items()]
    rows = _statement(_CHANGE, len(amounts)).rows(connection, _values(amounts))
    return {CounterId(*row[:3]): row[3] for row in rows}


def lock(connection: Connection, wanted: Iterable[CounterId]) -> dict[CounterId, int]:
    """What counters hold, which nobody else changes until the transaction ends."""
    return change(connection, dict.fromkeys(wanted, 0))


def read(connection: Connection, subjects: Iterable[str], periods: Iterable[str]) -> dict[CounterId, int]:
    """What the counters of these subjects hold; one that was never used is not in it."""
    rows = connection.execute(_READ, {"subjects": [*subjects], "periods": [*periods]})
    return {CounterId(*row[:3]): row[3] for row in rows}


@cache
def _statement(what: str, count: int) -> Prepared:
    rows = ", ".join(f"(:s{i}, :p{i}, :m{i}, :u{i}, :c{i})" for i in range(count))
    return Prepared(text(_SET.format(rows=rows) + what))


def _values(amounts: list[Amount]) -> dict[str, str | int]:
    values: dict[str, str | int] = {}
    for i, (counter, amount, ceiling) in enumerate(sorted(amounts)):
        values |= {f"s{i}": counter.subject, f"p{i}": counter.period, f"m{i}": counter.metric}
        values |= {f"u{i}": amount, f"c{i}": ceiling}
    return values
