"""A cache and what runs its model: refused where it means nothing, and asked no more than it was made for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamtap.errors import InvalidInput, Unsupported
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
    tries: list[int] = []
    engine.trying = tries.append  # type: ignore[attr-defined]

    open_cache().warmup(PROMPTS, max_retries=7)
    open_cache().warmup([*PROMPTS, "and one more"])

    assert tries == [7]
