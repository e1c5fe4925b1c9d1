"""Requests side by side, so many at once as a server lets a key have, and asked again where the way there fails.

::

    items ─► lanes: threads that each wait for one answer ─► results as they come; the next item waits for the reader
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TypeVar

from streamtap.errors import (
    AccessDenied,
    EngineFailed,
    EngineOutOfMemory,
    InvalidInput,
    StreamtapError,
    TransferFailed,
)

T = TypeVar("T")
R = TypeVar("R")

#: What may pass with nothing changed: a connection that broke, an engine that died under the request, a full device.
_PASSES = (TransferFailed, EngineFailed, EngineOutOfMemory)
_LARGEST_PAUSE_SECONDS = 15.0


@dataclass
class Insistence:
    """Asks again, up to ``max_retries`` times, with twice the pause each time; ``first_seconds`` is the first one.

    ``waiting`` is called with each error that is waited out.
    """

    max_retries: int
    first_seconds: float = 0.5
    waiting: Callable[[StreamtapError], None] = field(default=lambda _error: None, repr=False)
    never: threading.Event = field(default_factory=threading.Event, repr=False)

    def __call__(
        self, ask: Callable[[], R], *, stopped: threading.Event | None = None, even_in_doubt: bool = False
    ) -> R:
        """What ``ask`` gives; ``stopped`` ends the waiting.

        ``even_in_doubt`` also repeats what the server may have begun, where that does no harm.

        Raises:
            StreamtapError: what no repeating mends, or what still came at the last try.
        """
        over = stopped or self.never
        for tried in range(self.max_retries):
            try:
                return ask()
            except _PASSES as error:
                if isinstance(error, AccessDenied) or not (error.retryable or even_in_doubt):
                    raise
                self.waiting(error)
                if over.wait(min(self.first_seconds * 2.0**tried, _LARGEST_PAUSE_SECONDS)):
                    raise
        return ask()


class Lanes:
    """Threads that each wait for one answer at a time, ``most`` of them; they end with the process, come what may."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._started, self._closed = 0, False
        self._lock = threading.Lock()

    def put(self, job: Callable[[], None]) -> None:
        """Run ``job`` as soon as a lane is free; it must not raise but where something is broken.

        Raises:
            InvalidInput: the lanes are closed.
        """
        with self._lock:
            if self._closed:
                raise closed_engine()
            self._jobs.put(job)
            is_full = self._started >= self.most
            self._started += not is_full
        if not is_full:
            self._start()

    def each(self, work: Callable[[T, threading.Event], R], items: Iterable[T]) -> Iterator[tuple[T, R]]:
        """``work`` of each item, in the order of their ends, each once; the first that raises ends it.

        At most ``most`` items are under way or wait for the reader, who may take as long as he likes. ``work`` is also
        given what is set once nobody reads any more.

        Raises:
            InvalidInput: the lanes were closed.
            StreamtapError: as ``work``.
        """
        done: queue.SimpleQueue[tuple[T, R | None, BaseException | None]] = queue.SimpleQueue()
        stopped, waiting, under_way = threading.Event(), iter(items), 0
        try:
            for item in islice(waiting, self.most):
                self.put(partial(_work_on, work, item, stopped, done))
                under_way += 1
            while under_way:
                item, made, error = done.get()
                under_way -= 1
                if error is not None:
                    raise error
                for following in islice(waiting, 1):
                    self.put(partial(_work_on, work, following, stopped, done))
                    under_way += 1
                yield item, made  # type: ignore[misc]  # there where there is no error
        finally:
            stopped.set()

    def close(self) -> None:
        """End the lanes once each is through with what it has."""
        with self._lock:
            self._closed = True
            for _ in range(self._started):
                self._jobs.put(None)

    def _start(self) -> None:
        # Not of an executor, whose threads a process waits for at its end, for as long as a server is silent.
        threading.Thread(target=self._work, name="streamtap-api", daemon=True).start()

    def _work(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                job()
                # It holds a client with its connections, which a lane that waits must not keep.
                job = None
        except BaseException:
            # This thread ends, and Python says why; what waits behind the job goes on in another.
            self._start()
            raise
        with self._lock:
            self._started -= 1


def closed_engine() -> InvalidInput:
    """What whoever asks anything of an engine that is closed is told."""
    return InvalidInput("this engine is closed; load it again.")


def _work_on(
    work: Callable[[T, threading.Event], R],
    item: T,
    stopped: threading.Event,
    done: queue.SimpleQueue[tuple[T, R | None, BaseException | None]],
) -> None:
    if stopped.is_set():
        return
    try:
        done.put((item, work(item, stopped), None))
    except StreamtapError as error:
        done.put((item, None, error))
    except BaseException as error:
        done.put((item, None, error))
        raise
