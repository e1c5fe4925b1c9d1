"""Months and days of the calendar in UTC, by which quotas are counted."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import Literal

Span = Literal["month", "day"]

#: The period of what is held just now and belongs to no month.
JUST_NOW = ""


def period(span: Span, at: datetime) -> str:
    """``2026-11`` or ``2026-11-30``."""
    day = at.astimezone(UTC).date().isoformat()
    return day[:7] if span == "month" else day


def next_start(span: Span, at: datetime) -> datetime:
    """When the next month or day begins."""
    today = at.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if span == "day":
        return today + timedelta(days=1)
    return (today.replace(day=1) + timedelta(days=32)).replace(day=1)


def seconds_left(span: Span, at: datetime) -> int:
    """Whole seconds until then, 1 or more."""
    return math.ceil((next_start(span, at) - at).total_seconds())
