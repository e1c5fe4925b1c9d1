"""What a bulk job adds to the counters when it is taken on, and what it gives back."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from streamtap.errors import HarvestCapacityExceeded, HarvestConcurrencyExceeded, LimitReached
from streamtap.server.config import Limits
from streamtap.server.db import counters
from streamtap.server.db.counters import Amount, CounterId
from streamtap.server.db.tables import UNLIMITED
from streamtap.server.harvests.jobs import JobAsked, Lane
from streamtap.server.ledger.keys import KeyRecord
from streamtap.server.ledger.quotas import HARVEST_QUOTAS, HARVESTS, Quota, harvest_slots, places
from streamtap.server.ledger.reservation import exceeded

if TYPE_CHECKING:
    from sqlalchemy import Connection, Row

#: When a slot may be free again, in seconds.
_RETRY_SECONDS = 30


def charge(connection: Connection, key: KeyRecord, asked: JobAsked, limits: Limits, at: datetime) -> None:
    """Add a job to every counter that it concerns; what it raises has to undo the transaction.

    Raises:
        LimitReached: one has no room; that of the month is named first, then slots, then tokens.
    """
    wanted = _wanted(key, asked.lane, asked.n_tokens, limits, at)
    held = counters.hold(connection, wanted.values())
    short = [what for what, amount in wanted.items() if amount.counter not in held]
    if short:
        raise _refusal(connection, short[0], wanted[short[0]], asked.lane, at)


def check_room(connection: Connection, key: KeyRecord, lane: Lane, limits: Limits, at: datetime) -> None:
    """Refuse a job of ``lane`` that has no room just now, whatever its tokens; nothing is held.

    Raises:
        LimitReached: as ``charge``.
    """
    wanted = _wanted(key, lane, 0, limits, at)
    counted = [amount.counter for amount in wanted.values()]
    used = counters.read(connection, {each.subject for each in counted}, {each.period for each in counted})
    for what, amount in wanted.items():
        if used.get(amount.counter, 0) + amount.amount > amount.ceiling:
            raise _refusal(connection, what, amount, lane, at)


def freed(row: Row[Any]) -> dict[CounterId, int]:
    """The slots of a job, once it is over."""
    return dict.fromkeys(harvest_slots(row.key_id, row.lane), -1)


def refunded(row: Row[Any]) -> dict[CounterId, int]:
    """What the job was charged, in the month and day in which it was."""
    found = places(row.key_id, row.user, row.created_at, HARVEST_QUOTAS)
    return {counter: -_amount(quota, row.n_tokens) for quota, counter in found.items()}


def _wanted(key: KeyRecord, lane: Lane, n_tokens: int, limits: Limits, at: datetime) -> dict[Quota | str, Amount]:
    """In the order in which they refuse."""
    found = places(key.id, key.user, at, HARVEST_QUOTAS)
    quotas: dict[Quota | str, Amount] = {
        quota: Amount(counter, _amount(quota, n_tokens), quota.ceiling(key, limits)) for quota, counter in found.items()
    }
    of_key, of_all = harvest_slots(key.id, lane)
    most = limits.small_harvests_per_key if lane == "small" else limits.large_harvests_per_key
    most_of_all = UNLIMITED if lane == "small" else limits.large_harvests
    return {
        HARVESTS: quotas.pop(HARVESTS),
        "key": Amount(of_key, 1, most),
        "all": Amount(of_all, 1, most_of_all),
        **quotas,
    }


def _amount(quota: Quota, n_tokens: int) -> int:
    return 1 if quota is HARVESTS else n_tokens


def _refusal(connection: Connection, what: Quota | str, amount: Amount, lane: Lane, at: datetime) -> LimitReached:
    counter, ceiling = amount.counter, amount.ceiling
    used = counters.read(connection, [counter.subject], [counter.period]).get(counter, 0)
    if isinstance(what, Quota):
        return exceeded(what, used, ceiling, amount.amount, at)
    error: LimitReached
    if what == "key":
        error = HarvestConcurrencyExceeded(
            f"this key has {used} harvest jobs of {lane} models under way, and may have {ceiling}; wait for one "
            "to end, or cancel one."
        )
    else:
        error = HarvestCapacityExceeded(
            f"{used} harvest jobs of {lane} models are under way, and there may be {ceiling}; try again later."
        )
    error.retry_after_seconds = _RETRY_SECONDS
    return error
