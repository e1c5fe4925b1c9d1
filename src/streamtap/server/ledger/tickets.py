"""What passes between the gateway and the ledger about one request."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from streamtap.server.ledger.keys import KeyRecord


@dataclass(frozen=True)
class Asked:
    """What a request may come to at most. ``output_tokens`` are of all ``sequences`` together."""

    input_tokens: int
    output_tokens: int
    activations: int
    sequences: int = 1


@dataclass(frozen=True)
class Unreserved:
    """What a request asked for that nothing limits, and when: it may wait for the settlement to be counted."""

    model: str
    asked: Asked
    at: datetime


@dataclass(frozen=True)
class Ticket:
    """A request that was let in. ``active``: it has a slot; else it waits for one.

    ``unreserved``: what its settlement is to charge where nothing was reserved.
    """

    id: str
    key: KeyRecord
    active: bool
    unreserved: Unreserved | None = None


@dataclass(frozen=True)
class Grant:
    """How many output tokens a request may make; ``clamped`` where that is fewer than it asked for."""

    output_tokens: int
    clamped: bool


@dataclass(frozen=True)
class Outcome:
    """How a request ended.

    ``input_tokens`` and ``output_tokens`` are what it came to; None where that is unknown, and then what was reserved
    counts. ``refund``: it failed on the server's side or was refused after it had reserved, so nothing counts.
    ``model`` is what it asked for, where that is known; a request that reserved has said it before.
    """

    status: int
    code: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    refund: bool = False
    capture_bytes: int = 0
    seconds: float = 0.0
    model: str | None = None
