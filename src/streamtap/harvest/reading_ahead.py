"""Reads ahead on a thread: prompts are tokenised while the model runs, and never many more than it needs next."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from concurrent import futures
from contextlib import contextmanager
from queue import Full, Queue
from typing import Any, Final, TypeVar

T = TypeVar("T")
_LOOK_SECONDS = 0.2
#: How long a run that ends early waits for a source that may never give anything again, such as a pipe.
_PATIENCE_SECONDS = 2.0
_END: Final = object()


@contextmanager
def read_ahead(items: Iterable[T], most: int) -> Iterator[Iterator[T]]:
    """The same items in the same order, of which up to ``most`` wait; what the source raises comes after those.

    The thread ends soon after the ``with``, wherever that is left.
    """
    queue, stopped = Queue[Any](most), threading.Event()
    pool = futures.ThreadPoolExecutor(1, thread_name_prefix="streamtap-reading")
    reading = pool.submit(_read, items, queue, stopped)
    try:
        yield _given(queue, reading)
    finally:
        stopped.set()
        futures.wait([reading], _PATIENCE_SECONDS)
        pool.shutdown(wait=False)


def _given(queue: Queue[Any], reading: futures.Future[None]) -> Iterator[Any]:
    while (item := queue.get()) is not _END:
        yield item
    reading.result()


def _read(items: Iterable[Any], queue: Queue[Any], stopped: threading.Event) -> None:
    try:
        for item in items:
            if not _put(item, queue, stopped):
                return
    finally:
        _put(_END, queue, stopped)


def _put(item: Any, queue: Queue[Any], stopped: threading.Event) -> bool:
    while not stopped.is_set():
        try:
            queue.put(item, timeout=_LOOK_SECONDS)
            return True
        except Full:
            continue
    return False
