"""Work on a thread of its own that the caller never gets far ahead of: it blocks, and nothing is dropped."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_LOOK_SECONDS = 0.25


def nothing() -> None:
    """Do nothing."""


class Background:
    """Runs calls on ``threads``, with at most ``most`` of them waiting or running.

    After one has failed, ``do`` and ``drain`` raise what it raised, and nothing that waited is run. ``look`` is called
    now and then while the caller waits, and ends the wait by raising. ``give_up`` is called where the block fails: what
    runs is waited for, so it should end soon then.
    """

    def __init__(
        self,
        name: str,
        *,
        threads: int = 1,
        most: int = 2,
        look: Callable[[], None] = nothing,
        give_up: Callable[[], None] = nothing,
    ) -> None:
        self._look, self._give_up = look, give_up
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._room = threading.BoundedSemaphore(most)
        self._failure: BaseException | None = None
        self._waiting: set[Future[Any]] = set()

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Wait for what runs; where the block failed, what waits is not run."""
        try:
            if kind is None:
                self.drain()
            else:
                self._give_up()
        except BaseException:
            self._give_up()
            raise
        finally:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def do(self, function: Callable[P, T], *args: P.args, **named: P.kwargs) -> Future[T]:
        """Queue a call; blocks while ``most`` of them are there."""
        while not self._room.acquire(timeout=_LOOK_SECONDS):
            self._look()
        if self._failure is not None:
            self._room.release()
            raise self._failure
        future = self._pool.submit(self._run, partial(function, *args, **named))
        self._waiting.add(future)
        future.add_done_callback(self._done)
        return future

    def drain(self) -> None:
        """Return once all is done."""
        for future in list(self._waiting):
            while not wait([future], _LOOK_SECONDS).done:
                self._look()
            # A future wakes those who wait for it before it calls ``_done``.
            if not future.cancelled() and self._failure is None:
                self._failure = future.exception()
        if self._failure is not None:
            raise self._failure

    def _run(self, call: Callable[[], T]) -> T:
        if self._failure is not None:
            raise self._failure
        return call()

    def _done(self, future: Future[Any]) -> None:
        if not future.cancelled() and self._failure is None:
            self._failure = future.exception()
        self._waiting.discard(future)
        self._room.release()
