"""Reserving what a request may use at most, before it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from streamtap.errors import ActivationQuotaExceeded, BudgetExceeded, HarvestQuotaExceeded, LimitReached
from streamtap.server.config import Limits
from streamtap.server.db import Database, counters, ticket_rows
from streamtap.server.db.counters import Amount, CounterId
from streamtap.server.db.tables import UNLIMITED
from streamtap.server.ledger.admission import gone
from streamtap.server.ledger.keys import KeyRecord
from streamtap.server.ledger.periods import next_start, period, seconds_left
from streamtap.server.ledger.quotas import ACTIVATIONS, HARVESTS, METRICS, QUOTAS, Quota, places
from streamtap.server.ledger.tickets import Asked, Grant, Ticket, Unreserved

if TYPE_CHECKING:
    from sqlalchemy import Connection

_SPANS = {"month": "this month", "day": "today"}
_KINDS: dict[Quota, type[LimitReached]] = {ACTIVATIONS: ActivationQuotaExceeded, HARVESTS: HarvestQuotaExceeded}


class Reservation:
    """Holds amounts for tickets on every counter that they concern."""

    def __init__(self, database: Database, limits: Limits, now: Callable[[], datetime]) -> None:
        self._database = database
        self._limits = limits
        self._now = now

    def check_activation_quota(self, ticket: Ticket, activations: int) -> None:
        """See ``Ledger.check_activation_quota``."""
        key, at = ticket.key, self._now()
        ceiling = ACTIVATIONS.ceiling(key, self._limits)
        if ceiling == UNLIMITED:
            return
        counter = places(key.id, key.user, at)[ACTIVATIONS]
        with self._database.reading() as connection:
            used = counters.read(connection, [counter.subject], [counter.period]).get(counter, 0)
        if used + activations > ceiling:
            raise exceeded(ACTIVATIONS, used, ceiling, activations, at)

    def unreserved(self, ticket: Ticket, model: str, asked: Asked) -> Ticket | None:
        """See ``Ledger.unreserved``."""
        concerned = [quota for quota in QUOTAS if getattr(asked, quota.metric)]
        if any(quota.ceiling(ticket.key, self._limits) != UNLIMITED for quota in concerned):
            return None
        return replace(ticket, unreserved=Unreserved(model, asked, self._now()))

    def reserve(self, ticket: Ticket, model: str, asked: Asked) -> Grant:
        """One transaction: see ``Ledger.reserve``."""
        at = self._now()
        wanted = self._wanted(ticket.key, asked, at)
        with self._database.writing() as connection:
            _note(connection, ticket, model, asked, at)
            held = counters.hold(connection, wanted.values())
            if len(held) == len(wanted):
                return Grant(asked.output_tokens, clamped=False)
            # Taken back, and read under the lock of each counter: what is left is still there when it is taken.
            back = {entry.counter: -entry.amount if entry.counter in held else 0 for entry in wanted.values()}
            room = _room(wanted, counters.change(connection, back), asked, at)
            granted = replace(asked, output_tokens=room)
            _note(connection, ticket, model, granted, at)
            again = self._wanted(ticket.key, granted, at).values()
            counters.change(connection, {entry.counter: entry.amount for entry in again})
            return Grant(room, clamped=True)

    def _wanted(self, key: KeyRecord, asked: Asked, at: datetime) -> dict[Quota, Amount]:
        """What it would add to each counter, and how far that may go; nothing for what it does not use."""
        amounts: dict[str, int] = {metric: getattr(asked, metric) for metric in METRICS}
        return {
            quota: Amount(counter, amounts[quota.metric], quota.ceiling(key, self._limits))
            for quota, counter in places(key.id, key.user, at).items()
            if amounts[quota.metric]
        }


def _note(connection: Connection, ticket: Ticket, model: str, asked: Asked, at: datetime) -> None:
    values: dict[str, Any] = {metric: getattr(asked, metric) for metric in METRICS}
    if not ticket_rows.reserve(connection, ticket.id, values | {"model": model, "reserved_at": at}):
        raise gone()


def _room(wanted: Mapping[Quota, Amount], used: Mapping[CounterId, int], asked: Asked, at: datetime) -> int:
    """How many output tokens fit; raises where not one for each sequence does, or something else does not."""
    room = asked.output_tokens
    for quota, entry in wanted.items():
        is_output = quota.metric == "output_tokens"
        least = min(asked.sequences, entry.amount) if is_output else entry.amount
        if used[entry.counter] + least > entry.ceiling:
            raise exceeded(quota, used[entry.counter], entry.ceiling, least, at)
        if is_output:
            room = min(room, entry.ceiling - used[entry.counter])
    return room - room % asked.sequences if room < asked.output_tokens else room


def exceeded(quota: Quota, used: int, ceiling: int, needed: int, at: datetime) -> LimitReached:
    """The refusal of a quota that has no room for what is needed."""
    what, turns = quota.metric.replace("_", " "), next_start(quota.span, at).strftime("%Y-%m-%d %H:%M UTC")
    kind = _KINDS.get(quota, BudgetExceeded)
    error = kind(
        f"this {quota.whose} has used {used}/{ceiling} {what} {_SPANS[quota.span]} ({period(quota.span, at)}) and this "
        f"request needs at least {needed}; the count starts anew at {turns}."
    )
    error.retry_after_seconds = seconds_left(quota.span, at)
    return error
