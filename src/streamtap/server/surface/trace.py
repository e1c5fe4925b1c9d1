"""What is known of one request for its log line and its metrics: counts and names, never content."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

_KEY = "streamtap.trace"


@dataclass
class Trace:
    """One request from its first byte to its last; times are the clock's ``monotonic()``."""

    request_id: str
    endpoint: str
    method: str
    started: float
    key_prefix: str | None = None
    model: str | None = None
    status: int = 0
    code: str | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    capture_bytes: int = 0
    first_byte_at: float | None = None

    def attach(self, scope: MutableMapping[str, Any]) -> None:
        """Let ``trace_of`` find it."""
        scope[_KEY] = self


def trace_of(scope: Mapping[str, Any]) -> Trace:
    """The trace of the request that ``scope`` belongs to."""
    trace: Trace = scope[_KEY]
    return trace
