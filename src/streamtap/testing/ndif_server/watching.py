"""What passed through the stand-in, and what is to go wrong there."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

#: An HTTP status instead of the job; the job's own error; the socket closed in the middle, without a word or with one.
FaultKind = Literal["http", "job", "drop", "goodbye"]


@dataclass
class NdifJobSeen:
    """One job: bytes of the trace that came, of what it saved, and of what went out for that, compressed and framed."""

    model: str
    request_bytes: int
    result_bytes: int = 0
    sent_bytes: int = 0
    blob: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class NdifFault:
    """One thing that goes wrong: ``status`` and ``said`` of an answer, or what a job's error says."""

    kind: FaultKind
    said: str = ""
    status: int = 503


@dataclass
class Watch:
    """Jobs in the order in which they came, and faults in that in which they were asked for."""

    jobs: list[NdifJobSeen] = field(default_factory=list)
    _faults: deque[NdifFault] = field(default_factory=deque)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, fault: NdifFault, times: int) -> None:
        """Let ``fault`` happen to the next ``times`` requests."""
        with self._lock:
            self._faults.extend([fault] * times)

    def next_fault(self) -> NdifFault | None:
        """What is to go wrong with the request that came now."""
        with self._lock:
            return self._faults.popleft() if self._faults else None
