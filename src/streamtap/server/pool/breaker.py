"""Leaves an engine alone for a while once it failed several times in a row."""

from __future__ import annotations

import math

from streamtap.errors import CircuitOpen
from streamtap.server.clock import Clock


class Breaker:
    """Opens for ``seconds`` after ``failures`` in a row; then one more failure opens it again."""

    def __init__(self, name: str, clock: Clock, *, failures: int, seconds: float) -> None:
        self._name = name
        self._clock = clock
        self._most = failures
        self._seconds = seconds
        self._failures = 0
        self._open_until = -math.inf

    @property
    def is_open(self) -> bool:
        """Whether requests are refused now."""
        return self._clock.monotonic() < self._open_until

    def check(self) -> None:
        """Let a request pass.

        Raises:
            CircuitOpen: the breaker is open; it carries the seconds until it closes.
        """
        if not self.is_open:
            return
        seconds = math.ceil(self._open_until - self._clock.monotonic())
        error = CircuitOpen(
            f"{self._name} failed {self._most} times in a row and is left alone for now; "
            f"send the request again in {seconds} s."
        )
        error.retry_after_seconds = seconds
        raise error

    def succeeded(self) -> None:
        """An answer came: the failures before it no longer count."""
        self._failures = 0
        self._open_until = -math.inf

    def failed(self) -> None:
        """The engine failed, other than by being told something wrong."""
        self._failures += 1
        if self._failures >= self._most:
            self._failures = self._most - 1
            self._open_until = self._clock.monotonic() + self._seconds
