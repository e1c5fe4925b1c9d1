"""What a key has used and has left, as ``GET /v1/usage`` tells it."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from streamtap.server.config import Limits
from streamtap.server.db import Database, counters
from streamtap.server.db.tables import UNLIMITED
from streamtap.server.ledger.keys import KeyRecord
from streamtap.server.ledger.periods import JUST_NOW, next_start, period
from streamtap.server.ledger.quotas import HARVESTS, QUOTAS, limit, places, slots


def usage_of(database: Database, limits: Limits, key: KeyRecord, at: datetime) -> dict[str, Any]:
    """Of each quota ``used``, ``limit`` and ``remaining``, the last two null where it is unlimited.

    Requests under way count with what they have reserved.
    """
    quotas = (*QUOTAS, HARVESTS)
    found = places(key.id, key.user, at, quotas)
    subjects = {counter.subject for counter in found.values()}
    with database.reading() as connection:
        used = counters.read(connection, subjects, (JUST_NOW, period("month", at), period("day", at)))
    return {
        "key": key.prefix,
        "name": key.name,
        "user": key.user,
        "scopes": list(key.scopes),
        "month": period("month", at),
        "month_ends_at": next_start("month", at).isoformat(),
        "day": period("day", at),
        "day_ends_at": next_start("day", at).isoformat(),
        "usage": {quota.name: _line(used.get(found[quota], 0), quota.ceiling(key, limits)) for quota in quotas},
        "requests": {
            slot.metric: {"now": used.get(slot, 0), "limit": limit(key, limits, f"max_{slot.metric}")}
            for slot in slots(key.id)
        },
        "rate_per_minute": limit(key, limits, "rate_per_minute") or None,
    }


def _line(used: int, ceiling: int) -> dict[str, int | None]:
    if ceiling == UNLIMITED:
        return {"used": used, "limit": None, "remaining": None}
    return {"used": used, "limit": ceiling, "remaining": max(0, ceiling - used)}
