"""Rows of ``tickets``: requests under way. A transaction locks its ticket before any counter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, bindparam, delete, insert, or_, select, update

from streamtap.server.db.prepared import Prepared
from streamtap.server.db.tables import UtcTime, gateways, tickets

_ADDED = {"model": None, "reserved_at": None, "input_tokens": 0, "output_tokens": 0, "activations": 0}
_ADD = Prepared(insert(tickets))
_IS_ACTIVE = select(tickets.c.active).where(tickets.c.id == bindparam("ticket"))
_LOCK = _IS_ACTIVE.with_for_update()
_ACTIVATE = update(tickets).where(tickets.c.id == bindparam("ticket")).values(active=True)
_RESERVED = ("model", "reserved_at", "input_tokens", "output_tokens", "activations")
_RESERVE = Prepared(
    update(tickets)
    .where(tickets.c.id == bindparam("ticket"))
    .values({name: bindparam(f"new_{name}", type_=tickets.c[name].type) for name in _RESERVED})
)
_END = Prepared(delete(tickets).where(tickets.c.id == bindparam("ticket")).returning(tickets), *tickets.columns)
_LEFT_BEHIND = select(tickets.c.id).where(
    or_(
        tickets.c.gateway.in_(bindparam("dead", expanding=True)),
        (tickets.c.at < bindparam("before", type_=UtcTime)) & tickets.c.gateway.not_in(select(gateways.c.id)),
    )
)


def add(connection: Connection, values: Mapping[str, Any]) -> None:
    """Write a new ticket, which has reserved nothing yet."""
    _ADD.run(connection, {**_ADDED, **values})


def is_active(connection: Connection, ticket_id: str) -> bool | None:
    """Whether it has a slot; None where it is gone."""
    return connection.execute(_IS_ACTIVE, {"ticket": ticket_id}).scalar()


def lock(connection: Connection, ticket_id: str) -> bool | None:
    """As ``is_active``, and no one else changes it until the transaction ends."""
    return connection.execute(_LOCK, {"ticket": ticket_id}).scalar()


def activate(connection: Connection, ticket_id: str) -> None:
    """Give a ticket that waits its slot."""
    connection.execute(_ACTIVATE, {"ticket": ticket_id})


def reserve(connection: Connection, ticket_id: str, values: Mapping[str, Any]) -> bool:
    """Write what a ticket reserves, and when; False where it is gone."""
    told = {f"new_{name}": values[name] for name in _RESERVED}
    changed: int = _RESERVE.run(connection, {"ticket": ticket_id, **told}).rowcount
    return changed > 0


def end(connection: Connection, ticket_id: str) -> Any | None:
    """Take the ticket away and give its row; None where that was done before, so that only one does it."""
    return _END.first(connection, {"ticket": ticket_id})


def left_behind(connection: Connection, dead: Sequence[str], before: datetime) -> Sequence[str]:
    """Tickets of gateways that are ``dead``, and older ones of a gateway that nobody knows."""
    return connection.execute(_LEFT_BEHIND, {"dead": [*dead], "before": before}).scalars().all()
