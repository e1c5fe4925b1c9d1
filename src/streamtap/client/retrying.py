"""When to ask again, as a plan that both clients carry out, each in its own way of waiting."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TypeVar

from streamtap.client.answers import NoAnswer
from streamtap.errors import LimitReached, NotServing, StreamtapError

T = TypeVar("T")
Outcome = TypeVar("Outcome")

_FIRST_BACKOFF_SECONDS, _LARGEST_BACKOFF_SECONDS = 0.5, 30.0


@dataclass(frozen=True)
class Retries:
    """How long a client goes on asking.

    Only what the server says may be asked again is: its limits and its waits, by its own ``Retry-After``; and, at most
    ``connects`` times, a connection that failed before any answer. Nothing is begun later than ``patience_seconds``
    after the first request, and where the server asks for more than ``longest_wait_seconds`` its error is raised.
    ``waiting`` is called with each error that is waited out.
    """

    patience_seconds: float = 1200.0
    longest_wait_seconds: float = 120.0
    connects: int = 3
    now: Callable[[], float] = field(default=time.monotonic, repr=False)
    waiting: Callable[[StreamtapError], None] = field(default=lambda _error: None, repr=False)


PATIENT = Retries()


def asking(
    read: Callable[[Outcome], T], retries: Retries | None, at_once: tuple[type[StreamtapError], ...] = ()
) -> Generator[float, Outcome | NoAnswer, T]:
    """Ask until ``read`` takes an outcome, or nothing is left but to raise what it raised.

    Errors of the classes ``at_once`` are not waited out. Each yielded number is how many seconds to wait before the
    request is sent once more; what came of it is to be sent in.
    """
    plan = retries or Retries(patience_seconds=0.0, connects=0)
    began, wait, refused = plan.now(), 0.0, 0
    while True:
        outcome = yield wait
        try:
            if isinstance(outcome, NoAnswer):
                raise outcome.error
            return read(outcome)
        except at_once:
            raise
        except StreamtapError as error:
            next_wait = _wait(plan, error, outcome, refused)
            over = next_wait is None or next_wait > plan.longest_wait_seconds
            if next_wait is None or over or plan.now() - began + next_wait > plan.patience_seconds:
                raise
            plan.waiting(error)
            wait, refused = next_wait, refused + 1


def _wait(plan: Retries, error: StreamtapError, outcome: object, refused: int) -> float | None:
    """Seconds to wait before asking again; None where that is of no use."""
    backoff = min(_FIRST_BACKOFF_SECONDS * 2.0**refused, _LARGEST_BACKOFF_SECONDS)
    if isinstance(outcome, NoAnswer):
        return backoff if outcome.unheard and refused < plan.connects else None
    if not error.retryable or not isinstance(error, LimitReached | NotServing):
        return None
    if error.retry_after_seconds is not None:
        return float(error.retry_after_seconds)
    # A limit that does not say when it ends, as of a month's quota, is not waited out.
    return None if isinstance(error, LimitReached) else backoff
