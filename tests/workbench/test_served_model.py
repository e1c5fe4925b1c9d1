"""A service's model behind a cache: asked once, remembered, and not asked where everything is there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamtap.errors import TransferFailed
from streamtap.testing.fake_engine import FakeEngine
from streamtap.workbench import served_model as module
from streamtap.workbench.unified_cache import UnifiedCache

PROMPTS = ["The sky", "is blue", "or grey"]
BASE = "http://127.0.0.1:9/v1"
OpenCache = Callable[..., UnifiedCache]


class Service:
    """What is there at the address: engines by the names of models, or nothing."""

    def __init__(self) -> None:
        self.engine = FakeEngine(dtype="bfloat16", named={"engine": "api", "commit": f"api:{BASE}#m"})
        self.is_away = False
        self.asked: list[dict[str, Any]] = []

    def load(self, model: str, **options: Any) -> FakeEngine:
        self.asked.append({"model": model, **options})
        if self.is_away:
            raise TransferFailed(f"{BASE} does not answer.")
        return self.engine


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    made = Service()
    monkeypatch.setattr(module, "load_engine", made.load)
    return made


@pytest.fixture
def open_cache(tmp_path: Path) -> OpenCache:
    def opened(model: str = "m", **options: Any) -> UnifiedCache:
        named = {"backend": "api", "api_base": BASE, "api_key": "secret", "cache_dir": tmp_path, "progress": False}
        return UnifiedCache(model, **{**named, **options})

    return opened


def test_its_rows_are_kept_like_any(service: Service, open_cache: OpenCache) -> None:
    cache = open_cache(layers=[1, 3])
    assert service.asked == []

    stats = cache.warmup(PROMPTS)
    rows = cache.activations(PROMPTS, 3)

    assert stats.activations_extracted == 3
    ids = [service.engine.tokenizer.read(prompt, 0) for prompt in PROMPTS]
    np.testing.assert_array_equal(rows, np.stack([service.engine.rows(each, 3)[-1] for each in ids]))
    assert service.asked == [
        {**{"model": "m", "backend": "api", "revision": None, "dtype": "auto", "api_base": BASE, "api_key": "secret"}}
    ]


def test_what_is_cached_needs_no_service(service: Service, open_cache: OpenCache) -> None:
    ids = [[5, 6, 7], [8, 9]]
    first = open_cache().activations(ids, 2)
    service.is_away = True

    again = open_cache().activations(ids, 2)

    np.testing.assert_array_equal(first, again)
    assert len(service.asked) == 1
    with pytest.raises(TransferFailed):
        open_cache().activations([[5, 5]], 2)


def test_two_services_are_two_models(service: Service, open_cache: OpenCache) -> None:
    open_cache().warmup([[5, 6]])
    service.engine = FakeEngine(dtype="bfloat16", named={"engine": "api", "commit": "api:http://other/v1#m"})

    stats = open_cache(api_base="http://127.0.0.1:8/v1").warmup([[5, 6]])

    assert stats.activations_extracted == 1
    assert len(service.asked) == 2


def test_the_key_is_kept_nowhere(service: Service, open_cache: OpenCache, tmp_path: Path) -> None:
    open_cache().warmup(PROMPTS)

    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert files
    assert all(b"secret" not in file.read_bytes() for file in files)
