"""Jobs run in order of result, bounded, with one BLAS thread each."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from sklearn.exceptions import ConvergenceWarning
from threadpoolctl import threadpool_info

from streamtap.probes import parallel


def blas_threads() -> set[int]:
    np.ones((2, 2)) @ np.ones((2, 2))
    return {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}


def test_results_come_in_order_and_each_is_told() -> None:
    told: list[int] = []
    assert parallel.run_all([lambda i=i: i * i for i in range(50)], lambda: told.append(1)) == [
        i * i for i in range(50)
    ]
    assert len(told) == 50


def test_linear_algebra_is_single_threaded_inside_and_as_before_after() -> None:
    before = blas_threads()
    assert parallel.run_all([blas_threads, blas_threads]) == [{1}, {1}]
    assert blas_threads() == before


def test_jobs_are_drawn_here_and_only_a_little_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "_cores", lambda: 2)
    drawn: list[threading.Thread] = []
    finished: list[int] = []
    lead: list[int] = []

    def jobs() -> Iterator[Callable[[], None]]:
        for _ in range(40):
            drawn.append(threading.current_thread())
            lead.append(len(drawn) - len(finished))
            yield lambda: finished.append(1)

    parallel.run_all(jobs())
    assert set(drawn) == {threading.current_thread()}
    assert max(lead) <= 6


def test_the_first_error_in_order_is_raised() -> None:
    def fail(text: str) -> None:
        raise ValueError(text)

    with pytest.raises(ValueError, match="first"):
        parallel.run_all([lambda: None, lambda: fail("first"), lambda: fail("second")])


def test_only_warnings_of_no_convergence_are_held_back() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parallel.run_all(
            [lambda: warnings.warn("limit", ConvergenceWarning, 2), lambda: warnings.warn("other", UserWarning, 2)]
        )
    assert [str(warning.message) for warning in caught] == ["other"]
