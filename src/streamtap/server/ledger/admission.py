"""Letting a request in: rate limit, key, slot."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING

from streamtap.errors import KeyRefused, QueueFull, RateLimited, ServerRestarting
from streamtap.server.config import Limits
from streamtap.server.db import Database, counters, start_counts, ticket_rows
from streamtap.server.db.counters import CounterId
from streamtap.server.ledger.keys import KeyRecord, known_key, refusal
from streamtap.server.ledger.quotas import limit, slots
from streamtap.server.ledger.tickets import Ticket

if TYPE_CHECKING:
    from sqlalchemy import Connection

_RATE_SECONDS = 60
_QUEUE_SECONDS = 5


class Admission:
    """Gives tickets, and their slots to those that wait."""

    def __init__(self, database: Database, limits: Limits, gateway: str, now: Callable[[], datetime]) -> None:
        self._database = database
        self._limits = limits
        self._gateway = gateway
        self._now = now

    def admit(self, presented: str | None, *, scope: str, endpoint: str, request_id: str) -> Ticket:
        """One transaction: see ``Ledger.admit``."""
        with self._database.writing() as connection:
            # Only known keys are counted, so that made-up ones leave no rows behind.
            key = known_key(connection, presented)
            self._count_start(connection, key)
            # Not raised in here: a start that is refused was a start.
            given = refusal(key, scope) or self._slot(connection, key, endpoint, request_id)
        if isinstance(given, KeyRefused | QueueFull):
            raise given
        return given

    def authenticate(self, presented: str | None, scope: str | None) -> KeyRecord:
        """See ``Ledger.authenticate``."""
        with self._database.reading() as connection:
            key = known_key(connection, presented)
        if refused := refusal(key, scope):
            raise refused
        return key

    def activate(self, ticket: Ticket) -> bool:
        """See ``Ledger.activate``."""
        if ticket.active:
            return True
        if (active := self._seems_active(ticket)) is not None:
            return active
        with self._database.writing() as connection:
            active = ticket_rows.lock(connection, ticket.id)
            if active is None:
                raise gone()
            running, waiting = slots(ticket.key.id)
            if active or counters.lock(connection, [running])[running] >= self._most(ticket.key)[running]:
                return active
            counters.change(connection, {running: 1, waiting: -1})
            ticket_rows.activate(connection, ticket.id)
            return True

    def _seems_active(self, ticket: Ticket) -> bool | None:
        """What a look without a lock says; None where only a try can tell."""
        running, _ = slots(ticket.key.id)
        with self._database.reading() as connection:
            active = ticket_rows.is_active(connection, ticket.id)
            taken = counters.read(connection, [running.subject], [running.period]).get(running, 0)
        if active is None:
            raise gone()
        return True if active else False if taken >= self._most(ticket.key)[running] else None

    def _most(self, key: KeyRecord) -> dict[CounterId, int]:
        running, waiting = slots(key.id)
        return {running: limit(key, self._limits, "max_active"), waiting: limit(key, self._limits, "max_waiting")}

    def _count_start(self, connection: Connection, key: KeyRecord) -> None:
        most = limit(key, self._limits, "rate_per_minute")
        if most and not start_counts.count_start(connection, key.id, self._now(), most):
            error = RateLimited(
                f"this key started {most} requests in this minute, which is all that it may; wait a minute."
            )
            error.retry_after_seconds = _RATE_SECONDS
            raise error

    def _slot(self, connection: Connection, key: KeyRecord, endpoint: str, request_id: str) -> Ticket | QueueFull:
        (running, waiting), most = slots(key.id), self._most(key)
        taken = counters.lock(connection, [running, waiting])
        # A slot that was just freed is for those that wait: a newcomer goes behind them, as long as there is room.
        for place in (waiting, running) if taken[waiting] else (running, waiting):
            if taken[place] < most[place]:
                counters.change(connection, {place: 1})
                return self._ticket(connection, key, place is running, endpoint, request_id)
        error = QueueFull(
            f"this key has {taken[running]} requests running and {taken[waiting]} waiting; it may have {most[running]} "
            f"and {most[waiting]}."
        )
        error.retry_after_seconds = _QUEUE_SECONDS
        return error

    def _ticket(self, connection: Connection, key: KeyRecord, active: bool, endpoint: str, request_id: str) -> Ticket:
        ticket = Ticket(uuid.uuid4().hex, key, active)
        about = {"id": ticket.id, "gateway": self._gateway, "request_id": request_id[:64], "endpoint": endpoint}
        whose = {"key_id": key.id, "key_prefix": key.prefix, "user": key.user}
        ticket_rows.add(connection, {**about, **whose, "at": self._now(), "active": active})
        return ticket


def gone() -> ServerRestarting:
    """Why a ticket that was given is no more."""
    error = ServerRestarting("this gateway was not heard of for a while and lost the request's place; send it again.")
    error.retry_after_seconds = _QUEUE_SECONDS
    return error
