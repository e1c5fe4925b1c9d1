"""Which quotas there are, on what counter each is kept, and how far it goes for a key."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal, get_args

from streamtap.server.config import Limits
from streamtap.server.db.counters import CounterId
from streamtap.server.db.tables import UNLIMITED
from streamtap.server.ledger.keys import KeyRecord
from streamtap.server.ledger.periods import JUST_NOW, Span, period

Metric = Literal["activations", "input_tokens", "output_tokens"]
#: What a request reserves and is charged; jobs are counted beside them.
METRICS: tuple[Metric, ...] = get_args(Metric)

#: The server's settings whose name is longer than the key's own.
_SERVER_NAMES = {"max_active": "max_active_per_key", "max_waiting": "max_waiting_per_key"}


@dataclass(frozen=True, eq=False)
class Quota:
    """One limit on what is used in a month or day; ``name`` is that of the setting."""

    name: str
    whose: Literal["key", "user"]
    span: Span
    metric: Metric | Literal["harvests"]

    def ceiling(self, key: KeyRecord, limits: Limits) -> int:
        """How far it goes."""
        return limit(key, limits, self.name) or UNLIMITED


#: In the order in which they refuse.
QUOTAS = (
    Quota("monthly_activations", "key", "month", "activations"),
    Quota("monthly_input_tokens", "key", "month", "input_tokens"),
    Quota("daily_input_tokens", "key", "day", "input_tokens"),
    Quota("user_monthly_input_tokens", "user", "month", "input_tokens"),
    Quota("user_daily_input_tokens", "user", "day", "input_tokens"),
    Quota("monthly_output_tokens", "key", "month", "output_tokens"),
    Quota("daily_output_tokens", "key", "day", "output_tokens"),
    Quota("user_monthly_output_tokens", "user", "month", "output_tokens"),
    Quota("user_daily_output_tokens", "user", "day", "output_tokens"),
)
ACTIVATIONS = QUOTAS[0]
HARVESTS = Quota("monthly_harvests", "key", "month", "harvests")
#: Those of a job, in the order in which they refuse.
HARVEST_QUOTAS = (HARVESTS, *(quota for quota in QUOTAS if quota.metric == "input_tokens"))


def places(key_id: int, user: str, at: datetime, quotas: tuple[Quota, ...] = QUOTAS) -> dict[Quota, CounterId]:
    """Where each quota is counted at that time."""
    subjects = {"key": f"key:{key_id}", "user": f"user:{user}"}
    periods = {"month": period("month", at), "day": period("day", at)}
    return {quota: CounterId(subjects[quota.whose], periods[quota.span], quota.metric) for quota in quotas}


def limit(key: KeyRecord, limits: Limits, name: str) -> int:
    """The key's own limit, else the server's."""
    own: int | None = getattr(key.limits, name, None)
    if own is not None:
        return own
    found: int = getattr(limits, _SERVER_NAMES.get(name, name))
    return found


def slots(key_id: int) -> tuple[CounterId, CounterId]:
    """How many requests of a key run, and how many wait, just now."""
    return CounterId(f"key:{key_id}", JUST_NOW, "active"), CounterId(f"key:{key_id}", JUST_NOW, "waiting")


def harvest_slots(key_id: int, lane: str) -> tuple[CounterId, CounterId]:
    """How many jobs of a lane a key has under way just now, and how many all keys have."""
    metric = f"harvest_{lane}"
    return CounterId(f"key:{key_id}", JUST_NOW, metric), CounterId("all", JUST_NOW, metric)
