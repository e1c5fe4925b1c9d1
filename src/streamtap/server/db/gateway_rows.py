"""Rows of ``gateways``: who serves, and when each was last heard of."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import Connection, bindparam, delete, or_, select, text

from streamtap.server.db.tables import UtcTime, gateways

_SEEN = text(
    "INSERT INTO gateways (id, owner, seen_at) VALUES (:gateway, :owner, :at) "
    "ON CONFLICT (id) DO UPDATE SET seen_at = excluded.seen_at"
).bindparams(bindparam("at", type_=UtcTime))


def seen(connection: Connection, gateway: str, owner: str, at: datetime) -> None:
    """Note that a gateway lives."""
    connection.execute(_SEEN, {"gateway": gateway, "owner": owner, "at": at})


def dead(connection: Connection, *, before: datetime, gateway: str, owner: str) -> Sequence[str]:
    """Gateways not heard of since ``before``, and those that ``gateway`` is the successor of."""
    predecessor = (gateways.c.owner == owner) & (gateways.c.id != gateway) & (gateways.c.owner != "")
    return (
        connection.execute(select(gateways.c.id).where(or_(gateways.c.seen_at < before, predecessor))).scalars().all()
    )


def remove(connection: Connection, gateway: str) -> None:
    """Forget a gateway."""
    connection.execute(delete(gateways).where(gateways.c.id == gateway))
