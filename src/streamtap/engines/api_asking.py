"""One way to ask a service: patiently, with each failure told plainly, and of the model that was loaded alone.

::

    ask ─► asked again where the way fails ─► the list read again where the service was away ─► the answer, or why not
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from streamtap.client.sync import Client
from streamtap.engines.api_lanes import Insistence, closed_engine
from streamtap.engines.api_told import Told, told_of
from streamtap.errors import EngineFailed, NotServing, StreamtapError, TransferFailed

R = TypeVar("R")

_LOG = logging.getLogger(__name__)
#: Many requests find a service away at once, and each asks again.
_TOLD_EVERY_SECONDS = 15.0
#: After these it may be another service, or another engine, that answers.
_AWAY = (TransferFailed, NotServing, EngineFailed)
#: What reading an answer that is not of the shape that was expected comes to.
_MALFORMED = (ValueError, TypeError, LookupError, AttributeError, OverflowError)


class Outages:
    """How often a service was found away; whoever waits for it is told so, now and then, by ``now``'s seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.count = 0
        self._now, self._tell_at = now, -math.inf
        self._lock = threading.Lock()

    def note(self, error: StreamtapError) -> None:
        """Count ``error``, if it says that the service was away."""
        if isinstance(error, _AWAY):
            with self._lock:
                self.count += 1

    def waited_out(self, error: StreamtapError) -> None:
        """Note ``error``, which is waited out, and tell of it."""
        self.note(error)
        self.tell(error)

    def tell(self, error: StreamtapError) -> None:
        """Tell that ``error`` is waited out, unless that was told a moment ago."""
        with self._lock:
            is_due = self._now() >= self._tell_at
            if is_due:
                self._tell_at = self._now() + _TOLD_EVERY_SECONDS
        if is_due:
            _LOG.warning("waiting for the service: %s", error)


class Asking:
    """Asks by ``client`` for the model that ``told`` is about, as ``insistence`` says. Threads may share it.

    ``outages`` is also told of what the client waits out by itself. Once ``closed`` is set, whatever fails is told as
    the engine's being closed.
    """

    def __init__(self, client: Client, told: Told, insistence: Insistence, outages: Outages) -> None:
        self.insistence = insistence
        self.closed = threading.Event()
        self._client, self._told, self._outages = client, told, outages
        self._seen = outages.count
        self._lock = threading.Lock()

    def __call__(
        self, ask: Callable[[], R], *, stopped: threading.Event | None = None, even_in_doubt: bool = False
    ) -> R:
        """What ``ask`` gives, as ``Insistence`` has it, if the service still has the model.

        Raises:
            InvalidInput: the engine is closed, or the service came back with another model.
            EngineFailed: the answer is not of the shape that was expected.
            StreamtapError: as ``Insistence``.
        """
        over = stopped or self.closed
        with self.plainly():
            found = self.insistence(lambda: self._noted(ask), stopped=over, even_in_doubt=even_in_doubt)
            if self._seen != self._outages.count:
                with self._lock:
                    # Another thread may have asked while this one waited.
                    if self._seen != self._outages.count:
                        self._compare(over)
        return found

    def confirm(self) -> None:
        """Ask once whether the service still has the model.

        Raises:
            InvalidInput: it has another one.
            ModelNotFound: it has none of that name any more.
        """
        with self.plainly(), self._lock:
            self._compare(self.closed)

    def each(self, items: Iterable[R]) -> Iterator[R]:
        """``items`` as they come; what fails in making them is told plainly."""
        with self.plainly():
            yield from items

    @contextmanager
    def plainly(self) -> Iterator[None]:
        """What fails inside is told in one sentence."""
        try:
            yield
        except StreamtapError:
            if self.closed.is_set():
                raise closed_engine() from None
            raise
        except Exception as error:
            # A client that was closed under a request raises what its library raises.
            if self.closed.is_set():
                raise closed_engine() from None
            if isinstance(error, _MALFORMED):
                raise EngineFailed(
                    f"the service's answer is not of the shape that was expected ({type(error).__name__}); is its "
                    "address that of a service that this engine knows?"
                ) from error
            raise

    def _noted(self, ask: Callable[[], R]) -> R:
        try:
            return ask()
        except StreamtapError as error:
            self._outages.note(error)
            raise

    def _compare(self, over: threading.Event) -> None:
        counts: list[int] = []

        def now() -> Told:
            # An answer that is asked for now speaks for the time after every outage up to here.
            counts.append(self._outages.count)
            return told_of(self._client.models(), self._told.id)

        self._told.check_same(self.insistence(lambda: self._noted(now), stopped=over))
        self._seen = counts[-1]
