"""Fit many small models at once: a thread a core, each with single-threaded linear algebra."""

from __future__ import annotations

import os
import warnings
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from sklearn.exceptions import ConvergenceWarning
from threadpoolctl import threadpool_limits

Result = TypeVar("Result")


def run_all(jobs: Iterable[Callable[[], Result]], done: Callable[[], None] | None = None) -> list[Result]:
    """Run ``jobs`` on all cores and give their results in order; ``done`` is called after each.

    ``jobs`` is read in the calling thread, only as far ahead as keeps the cores busy, so that a
    generator may load what each job works on. ``done`` is called in the calling thread as well.
    The first error, in the order of ``jobs``, is raised once the running ones have ended. Warnings
    of no convergence are held back: a job is to report it in its result.
    """
    workers = _cores()
    results: list[Result] = []
    pending: deque[Future[Result]] = deque()

    def take_oldest() -> None:
        results.append(pending.popleft().result())
        if done is not None:
            done()

    # Both switches are the process's own, so they are thrown here once, not in each thread.
    with threadpool_limits(1, user_api="blas"), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        with ThreadPoolExecutor(workers) as pool:
            for job in jobs:
                pending.append(pool.submit(job))
                if len(pending) > 2 * workers:
                    take_oldest()
            while pending:
                take_oldest()
    return results


def _cores() -> int:
    # Fewer than the machine's where the process is pinned or in a container with a CPU set.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
