"""Where an engine answers, and what the pool asks of whatever runs there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from streamtap.server.config import ModelConfig, Role

#: Is told the stage that an engine enters on its way, and the stage's label for people.
Enter = Callable[[str, str], None]


@dataclass(frozen=True)
class Endpoint:
    """An engine that is ready.

    ``base_url`` has no ``/v1`` at its end; ``headers`` hold the engine's key; ``model`` is what the engine calls it.
    ``generation`` tells the runs of one engine apart.
    """

    base_url: str
    headers: Mapping[str, str] = field(repr=False)
    model: str
    model_id: str
    role: Role
    generation: int


class RunningEngine(Protocol):
    """An engine that answered."""

    @property
    def endpoint(self) -> Endpoint:
        """Where it answers."""
        ...

    async def ended(self) -> str:
        """Return once it ended by itself or was stopped: how, in words."""
        ...

    async def answers(self) -> bool:
        """Whether it still answers."""
        ...

    async def stop(self) -> None:
        """End it."""
        ...


@runtime_checkable
class Sleeps(RunningEngine, Protocol):
    """An engine that can give up its device's memory without ending. It takes no request until it is awake again."""

    async def sleep(self) -> None:
        """Return once its weights lie in the host's memory.

        Raises:
            EngineFailed: it cannot, or did not answer; ``EngineDead`` where it ended.
        """
        ...

    async def wake_up(self) -> None:
        """Return once it takes requests.

        Raises:
            EngineFailed: it cannot, or did not answer; ``EngineDead`` where it ended.
        """
        ...


class Launches(Protocol):
    """Starts engines."""

    async def start(self, model: ModelConfig, role: Role, generation: int, enter: Enter) -> RunningEngine:
        """Start an engine and wait until it answers; nothing is left of one whose start failed or was cancelled.

        Raises:
            EngineFailed: it could not be started; the message has the last stage.
        """
        ...
