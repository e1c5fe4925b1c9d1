"""What happens to engines, for logs and metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from streamtap.server.config import Role
from streamtap.server.pool.slot import State

EventKind = Literal["starting", "waking", "ready", "parked", "failed", "died", "stopped"]


@dataclass(frozen=True)
class EngineEvent:
    """Something happened to an engine, for logs and metrics; ``seconds`` is how long it took to start, wake or sleep.

    ``detail`` says why or how: ``"idle"``, ``"evicted"``, ``"closing"``, an error's message, an exit status in words.
    """

    kind: EventKind
    model_id: str
    role: Role
    state: State
    seconds: float | None = None
    detail: str = ""


OnEvent = Callable[[EngineEvent], None]


def ignore_event(_event: EngineEvent) -> None:
    """For a pool that nobody watches."""
