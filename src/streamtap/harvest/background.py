"""Work on a thread of its own that the caller never gets far ahead of: it blocks, and nothing is dropped."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Background:
    """Runs calls on ``threads``, with at most ``most`` of them waiting or running.

    After one has failed, ``do`` and ``drain`` raise what it raised, and nothing that waited is run.
    """

    def __init__(self, name: str, *, threads: int = 1, most: int = 2) -> None:
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
        finally:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def do(self, function: Callable[P, T], *args: P.args, **named: P.kwargs) -> Future[T]:
        """Queue a call; blocks while ``most`` of them are there."""
        self._room.acquire()
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
