"""How far an engine process is: from its start to a loaded model, or to what kept it from loading."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal

from streamtap.engines.base import Completes
from streamtap.errors import StreamtapError

_LOG = logging.getLogger(__name__)

Stage = Literal["starting", "loading_weights", "warming_up", "ready", "failed"]
LABELS: dict[Stage, str] = {
    "starting": "Starting the engine's process",
    "loading_weights": "Loading the weights",
    "warming_up": "Warming up",
    "ready": "Ready",
    "failed": "Loading failed",
}
Enter = Callable[[Stage], None]
#: Loads an engine and says which stage it enters; it runs in a thread of its own.
Load = Callable[[Enter], Completes]


class Loading:
    """An engine on its way; ``engine`` or ``error`` is set once it arrived."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.engine: Completes | None = None
        self.error: StreamtapError | None = None
        self._clock = clock
        self._lock = threading.Lock()
        self._stage: Stage = "starting"
        self._since = clock()

    def start(self, load: Load, failed: Callable[[], None] = lambda: None) -> None:
        """Load in a thread; ``failed`` is called from it if that ends without an engine."""
        threads = ThreadPoolExecutor(1, thread_name_prefix="streamtap-load")
        future = threads.submit(load, self.enter)
        future.add_done_callback(lambda done: self._arrived(done, failed))
        threads.shutdown(wait=False)

    def enter(self, stage: Stage) -> None:
        """Begin ``stage``."""
        with self._lock:
            self._stage, self._since = stage, self._clock()
        _LOG.info("stage: %s", stage)

    def ready(self, engine: Completes) -> None:
        """Have an engine."""
        self.engine = engine
        self.enter("ready")

    @property
    def stage(self) -> Stage:
        """The stage it is in."""
        return self._stage

    def view(self) -> dict[str, str | float]:
        """The stage, its label for people, and how long ago it began in seconds."""
        with self._lock:
            stage, age = self._stage, self._clock() - self._since
        return {"stage": stage, "stage_label": LABELS[stage], "stage_age_s": round(age, 3)}

    def _arrived(self, done: Future[Completes], failed: Callable[[], None]) -> None:
        error = done.exception()
        if error is None:
            self.ready(done.result())
            return
        _LOG.error("loading failed", exc_info=error)
        if not isinstance(error, StreamtapError):
            # What a library said is all there is to go by, and no caller's text is in it yet.
            error = StreamtapError(f"loading failed: {type(error).__name__}: {error}")
        self.error = error
        self.enter("failed")
        failed()
