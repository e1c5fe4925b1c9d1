"""How long to wait before a server is asked again, and when to stop asking."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from streamtap.errors import StreamtapError

#: A machine without a network should hear of it soon; a server that answered before is waited for.
FIRST_CONTACT_SECONDS = 30.0
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 1.0, 60.0
_USED_UP = re.compile(r"\br\s*=\s*0\s*;\s*t\s*=\s*(\d+)")


@dataclass(frozen=True)
class Failure:
    """A try that failed, in our words, and what it means for the next one.

    ``asked_seconds`` is what the server wants us to wait. ``most_tries`` bounds tries after
    failures of which nobody can say that they pass. ``counts`` says whether the time of the try
    was waiting too; time in which bytes went before a connection was cut was not.
    """

    error: StreamtapError
    again: bool = False
    answered: bool = False
    counts: bool = False
    asked_seconds: float | None = None
    most_tries: int | None = None


@dataclass
class Patience:
    """What is left of the time that one call may wait."""

    seconds: float
    sleep: Callable[[float], None]
    _spent: float = field(default=0.0, init=False)
    _tries: int = field(default=0, init=False)

    def wait_after(self, failure: Failure, took_seconds: float, *, first_contact: bool) -> float | None:
        """Wait for the next try; the seconds that were waited, or None where there is to be none."""
        self._tries += 1
        if failure.counts:
            # A client that waits by itself may take it all in one try; there is a second one at least.
            self._spent += min(took_seconds, self.seconds / 2)
        if not failure.again or (failure.most_tries is not None and self._tries >= failure.most_tries):
            return None
        wait = self._next(failure.asked_seconds)
        limit = min(self.seconds, FIRST_CONTACT_SECONDS) if first_contact else self.seconds
        if self._spent + wait > limit:
            return None
        self._spent += wait
        self.sleep(wait)
        return wait

    def _next(self, asked_seconds: float | None) -> float:
        doubled = min(_FIRST_WAIT_SECONDS * 2 ** (self._tries - 1), _LONGEST_WAIT_SECONDS)
        # Clients that failed together should not come back together.
        jitter = random.uniform(0.0, 0.25)
        return asked_seconds + jitter if asked_seconds is not None else doubled * (1 + jitter)


def asked_seconds(headers: Mapping[str, str]) -> float | None:
    """What the headers of a refusal ask for: ``Retry-After``, or a ``RateLimit`` that is used up."""
    value = headers.get("retry-after", "").strip()
    if value.isdigit():
        return float(value)
    if value:
        return _seconds_until(value, headers.get("date"))
    used_up = _USED_UP.search(headers.get("ratelimit", ""))
    return float(used_up[1]) if used_up else None


def _seconds_until(date: str, now: str | None) -> float | None:
    """Seconds from the server's own clock to a date; ours may be wrong."""
    try:
        until = parsedate_to_datetime(date)
        start = parsedate_to_datetime(now) if now else datetime.now(UTC)
        return max(0.0, (until - start).total_seconds())
    except (TypeError, ValueError):
        return None
