"""Things that go wrong on purpose: each is asked for beforehand, happens a number of times, and is counted."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from streamtap.errors import InvalidInput


@dataclass
class Fault:
    """Something that will go wrong with the requests whose ``METHOD /path`` the pattern finds.

    ``used`` says how often it happened so far, ``left`` how often it will.
    """

    kind: str
    match: re.Pattern[str]
    left: int
    used: int = 0
    status: int = 0
    retry_after: int | None = None
    after_bytes: int = 0


@dataclass
class Faults:
    """The faults of one server, in the order in which they were asked for."""

    _faults: list[Fault] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, fault: Fault) -> Fault:
        """Let ``fault`` happen from now on.

        Raises:
            InvalidInput: it would not happen once.
        """
        if fault.left < 1:
            raise InvalidInput(f"times must be 1 or more; got {fault.left}.")
        with self._lock:
            self._faults.append(fault)
        return fault

    def clear(self) -> None:
        """Let nothing go wrong any more."""
        with self._lock:
            for fault in self._faults:
                fault.left = 0
            self._faults.clear()

    def take(self, kind: str, line: str, fits: Callable[[Fault], bool] = lambda fault: True) -> Fault | None:
        """Use up one turn of the first fault that concerns the request, if there is one."""
        with self._lock:
            for fault in self._faults:
                if fault.kind == kind and fault.left and fault.match.search(line) and fits(fault):
                    fault.left -= 1
                    fault.used += 1
                    return fault
        return None
