"""Settling a request: once, whatever came of it."""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple

from streamtap.server.db import Database, counters, request_rows, ticket_rows
from streamtap.server.db.counters import CounterId
from streamtap.server.ledger.quotas import METRICS, Metric, places, slots
from streamtap.server.ledger.tickets import Outcome, Unreserved


class _Held(NamedTuple):
    """What a request asked for, when, and how much of it is on the counters already."""

    at: datetime
    asked: dict[Metric, int]
    counted: dict[Metric, int]


def settle(database: Database, ticket_id: str, outcome: Outcome, unreserved: Unreserved | None = None) -> bool:
    """One transaction: see ``Ledger.settle``."""
    with database.writing() as connection:
        # Whoever takes the row away settles; nobody else finds it.
        row = ticket_rows.end(connection, ticket_id)
        if row is None:
            return False
        held = _held(row, unreserved)
        counters.change(connection, {**_corrections(row, held, outcome), _freed(row): -1})
        request_rows.add(connection, _logged(row, unreserved, outcome))
    return True


def _freed(row: Any) -> CounterId:
    running, waiting = slots(row.key_id)
    return running if row.active else waiting


def _held(row: Any, unreserved: Unreserved | None) -> _Held | None:
    if row.reserved_at is not None:
        reserved = {metric: getattr(row, metric) for metric in METRICS}
        return _Held(row.reserved_at, reserved, reserved)
    if unreserved is not None:
        return _Held(
            unreserved.at, {metric: getattr(unreserved.asked, metric) for metric in METRICS}, dict.fromkeys(METRICS, 0)
        )
    return None


def _corrections(row: Any, held: _Held | None, outcome: Outcome) -> dict[CounterId, int]:
    """What counters differ by from what is on them, in the month and day in which it was asked for."""
    if held is None:
        return {}
    missing: dict[str, int] = {metric: _due(metric, held.asked, outcome) - held.counted[metric] for metric in METRICS}
    found = places(row.key_id, row.user, held.at) if any(missing.values()) else {}
    return {counter: missing[quota.metric] for quota, counter in found.items() if missing[quota.metric]}


def _due(metric: Metric, asked: dict[Metric, int], outcome: Outcome) -> int:
    if outcome.refund:
        return 0
    # An attempt to capture counts as one, whatever came of it.
    actual: int | None = None if metric == "activations" else getattr(outcome, metric)
    return asked[metric] if actual is None else actual


def _logged(row: Any, unreserved: Unreserved | None, outcome: Outcome) -> dict[str, Any]:
    about = {name: getattr(row, name) for name in ("at", "request_id", "key_prefix", "endpoint", "model")}
    about["model"] = about["model"] or (unreserved.model if unreserved is not None else outcome.model)
    names = ("status", "code", "input_tokens", "output_tokens", "seconds", "capture_bytes")
    return {**about, **{name: getattr(outcome, name) for name in names}}
