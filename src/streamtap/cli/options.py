"""Groups of options that a command, or several, have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def with_options(*groups: tuple[Callable[[Any], Any], ...]) -> Callable[[Any], Any]:
    """Give a command the options of all ``groups``, which its help shows in their order."""

    def dress(command: Any) -> Any:
        for option in reversed([option for group in groups for option in group]):
            command = option(command)
        return command

    return dress
