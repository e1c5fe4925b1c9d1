"""How often an engine across a network tries again, for one call alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from streamtap.engines.base import AcrossNetwork, Engine


class Patience:
    """Sets it for the calls of one cache, which threads may share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextmanager
    def of(self, engine: Engine, max_retries: int | None) -> Iterator[None]:
        """Have ``engine`` try ``max_retries`` times more in the block, and as before after it; None changes nothing."""
        if max_retries is None or not isinstance(engine, AcrossNetwork):
            yield
            return
        # One after another, or the second would take the first one's number for the engine's own.
        with self._lock:
            before = engine.trying(max_retries)
            try:
                yield
            finally:
                engine.trying(before)
