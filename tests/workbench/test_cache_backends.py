"""A cache and what runs its model: refused where it means nothing, and asked no more than it was made for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamtap.errors import InvalidInput, TransferFailed, Unsupported
from streamtap.testing.fake_engine import FakeEngine
from streamtap.workbench.unified_cache import UnifiedCache

PROMPTS = ["The sky", "is", "blue at noon, as a rule", "is"]
OpenCache = Callable[..., UnifiedCache]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def open_cache(tmp_path: Path, engine: FakeEngine) -> OpenCache:
    def opened(**options: Any) -> UnifiedCache:
        return UnifiedCache(engine, **{"cache_dir": tmp_path, "progress": False, **options})

    return opened


def test_a_backend_beside_an_engine_is_refused(open_cache: OpenCache) -> None:
    for options in ({"backend": "nnsight"}, {"backend": "api", "api_base": "http://127.0.0.1:1/v1"}):
        with pytest.raises(InvalidInput, match="backend.* cannot be set for an engine"):
            open_cache(**options)
    with pytest.raises(Unsupported, match="remote=True runs on NDIF, with backend='nnsight'"):
        open_cache(remote=True)


def test_a_cache_stays_where_it_was_made_for(open_cache: OpenCache) -> None:
    cache = open_cache()
    for ask in (cache.warmup, cache.get_activations, cache.get_perplexity, cache.get_logits):
        with pytest.raises(InvalidInput, match="made with remote=False"):
            ask(PROMPTS, remote=True)
    assert cache.warmup(PROMPTS, remote=False).activations_extracted == len(PROMPTS)


def test_a_warm_up_says_how_often_a_way_is_tried(open_cache: OpenCache, engine: FakeEngine) -> None:
    cache, running = open_cache(), _noted(engine)

    cache.warmup(PROMPTS, max_retries=7)
    cache.warmup([*PROMPTS, "and one more"])

    assert running == [7, 8]


def test_so_it_does_where_the_way_fails(open_cache: OpenCache, engine: FakeEngine) -> None:
    cache, running = open_cache(), _noted(engine)

    def fail(_number: int) -> None:
        raise TransferFailed("the way there is gone.")

    engine.before_batch = fail
    with pytest.raises(TransferFailed):
        cache.warmup(PROMPTS, max_retries=0)
    engine.before_batch = None
    cache.warmup(PROMPTS)

    assert running == [0, 8]


def test_warm_ups_side_by_side_leave_the_engines_own(open_cache: OpenCache, engine: FakeEngine) -> None:
    cache, running = open_cache(), _noted(engine)
    threads = [
        threading.Thread(target=cache.warmup, args=([f"prompt {n}"],), kwargs={"max_retries": n}) for n in (1, 2)
    ]

    def hold(number: int) -> None:
        if number == 0:  # the second one gets as far as it can
            threads[1].start()
            threads[1].join(0.3)
        else:
            threads[0].join()

    engine.before_batch = hold
    threads[0].start()
    threads[0].join()
    threads[1].join()
    engine.before_batch = None
    cache.warmup(["one more"])

    assert running == [1, 2, 8]


def _noted(engine: FakeEngine) -> list[int]:
    """How often a way was tried again in each capture that ran to its end or failed, of an engine whose own is 8."""
    running: list[int] = []
    current, capture = [8], engine.capture

    def trying(max_retries: int) -> int:
        current.append(max_retries)
        return current[-2]

    def captured(*asked: Any, **named: Any) -> Any:
        running.append(current[-1])
        return capture(*asked, **named)

    engine.trying, engine.capture = trying, captured  # type: ignore[attr-defined, method-assign]
    return running
