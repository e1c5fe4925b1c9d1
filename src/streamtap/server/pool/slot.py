"""One engine as the pool sees it: its state, who uses it, and when it may be started again."""

from __future__ import annotations

import asyncio
import math
from typing import Any, Literal

from streamtap.errors import StreamtapError
from streamtap.server.clock import Clock
from streamtap.server.config import ModelConfig, Role, Timing
from streamtap.server.pool.breaker import Breaker
from streamtap.server.pool.endpoint import RunningEngine, Sleeps

State = Literal["cold", "starting", "ready", "parked", "failed"]

_LABELS: dict[State, str] = {
    "cold": "Not running",
    "starting": "Starting",
    "ready": "Ready",
    "parked": "Asleep until it is needed",
    "failed": "The last start failed",
}


class Slot:
    """The place of one engine, whether it runs or not.

    ``users`` are the leases that hold it or wait for it, ``holders`` those that hold it. ``starting`` and ``stopping``
    are the tasks that do so. While ``admits`` is not set, the engine yields: it is leased to nobody new, and makes room
    for another once nobody holds it.

    An engine that runs is either ``engine``, which can be leased, or ``parked``: asleep, or on its way to it (the task
    is then ``parking``) or from it (which ``starting`` sees to). ``copy_bytes`` is what a copy of its weights may take
    of the host's memory, None where nobody asked yet, and ``has_copy`` whether this run took that already.
    """

    def __init__(self, model: ModelConfig, role: Role, clock: Clock, timing: Timing, breaker: Breaker) -> None:
        self.model = model
        self.role = role
        self.breaker = breaker
        self.state: State = "cold"
        self.engine: RunningEngine | None = None
        self.parked: Sleeps | None = None
        self.has_place = False
        self.has_copy = False
        self.copy_bytes: int | None = None
        self.users = 0
        self.holders = 0
        self.admits = asyncio.Event()
        self.admits.set()
        self.ready_since = -math.inf
        self.last_used = clock.monotonic()
        self.generation = 0
        self.suspect = False
        self.starting: asyncio.Task[StreamtapError | None] | None = None
        self.stopping: asyncio.Task[None] | None = None
        self.parking: asyncio.Task[None] | None = None
        self.awake = asyncio.Event()
        self._clock = clock
        self._timing = timing
        self._deaths = 0
        self._not_before = -math.inf
        self._lost = 0
        self.enter("cold")

    @property
    def is_process(self) -> bool:
        """Whether it is started here, and so takes one of the places for engines."""
        return self.model.engine != "url"

    @property
    def is_ready(self) -> bool:
        """Whether a lease would have it at once."""
        return self.state == "ready" and self.admits.is_set()

    @property
    def is_parked(self) -> bool:
        """Whether its engine is asleep, or on its way to it or from it."""
        return self.parked is not None

    @property
    def sleeper(self) -> Sleeps | None:
        """The engine, where it may be parked instead of stopped."""
        return self.engine if self.model.park and isinstance(self.engine, Sleeps) else None

    @property
    def may_make_room(self) -> bool:
        """Whether it could be stopped or parked now without taking it from anybody."""
        busy = self.users if self.admits.is_set() else self.holders
        return self.engine is not None and self.is_process and not busy

    def yields(self) -> None:
        """Let nobody new have it."""
        self.admits.clear()
        self.enter("ready", "yielding", "Making room for another engine")

    def goes_on(self) -> None:
        """Yield no longer, whether it stopped or is still there."""
        self.admits.set()
        if self.state == "ready":
            self.enter("ready")

    def runs(self, engine: RunningEngine) -> bool:
        """Whether ``engine`` is the one that runs, be it asleep."""
        return engine in (self.engine, self.parked)

    def rises(self, engine: RunningEngine) -> None:
        """Have an engine that just started, or woke."""
        self.engine, self.parked, self.suspect = engine, None, False
        self.ready_since = self._clock.monotonic()
        self.awake.set()
        self.enter("ready")
        self.used()

    def lies_down(self, engine: Sleeps) -> None:
        """Lease the engine to nobody from now on: it goes to sleep."""
        self.engine, self.parked = None, engine
        self.awake.clear()
        self.enter("parked", "parking", "Going to sleep")
        self.goes_on()

    def is_over(self) -> RunningEngine | None:
        """Have an engine no longer, asleep or awake; the one that is to be stopped."""
        engine = self.engine or self.parked
        self.engine = self.parked = None
        self.has_copy, self.copy_bytes = False, None
        return engine

    def enter(self, state: State, stage: str | None = None, label: str | None = None) -> None:
        """Be in ``state``, and at ``stage`` of it."""
        stage = stage or state
        if state != self.state or stage != getattr(self, "_stage", None):
            self._since = self._clock.monotonic()
        self.state = state
        self._stage, self._label = stage, label or _LABELS[state]

    def view(self) -> dict[str, Any]:
        """What clients are told of its start."""
        return {
            "warm": self.is_ready,
            "stage": self._stage,
            "stage_label": self._label,
            "stage_age_s": round(self._clock.monotonic() - self._since, 3),
        }

    def used(self) -> None:
        """Somebody used it until now."""
        self.last_used = self._clock.monotonic()

    def idle_left_seconds(self) -> float | None:
        """How long it may still stand idle; None where that is for ever."""
        if not self.model.idle_seconds or not self.is_process:
            return None
        since = self._clock.monotonic() if self.users else self.last_used
        return since + self.model.idle_seconds - self._clock.monotonic()

    def backoff_left_seconds(self) -> float:
        """How long to wait before the next start."""
        return max(0.0, self._not_before - self._clock.monotonic())

    def died(self) -> None:
        """It ended by itself, or did not start: wait longer each time before the next start."""
        wait = min(self._timing.restart_backoff_seconds * 2**self._deaths, self._timing.max_backoff_seconds)
        self._deaths = min(self._deaths + 1, 32)
        self._not_before = self._clock.monotonic() + wait

    def succeeded(self) -> None:
        """It answered a request whole."""
        self._deaths = 0

    def is_lost_anew(self, generation: int) -> bool:
        """A request lost run ``generation`` of the engine: whether that is news, since one end takes down many.

        A run that still goes on is to be looked at before it is leased again.
        """
        if self.suspect and generation == self.generation:
            return False
        runs = self.engine is not None and generation == self.generation
        self.suspect = self.suspect or runs
        news = runs or generation > self._lost
        self._lost = max(self._lost, generation)
        return news
