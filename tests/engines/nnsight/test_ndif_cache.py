"""A cache whose rows come from the stand-in of NDIF, over the demo model: the sample of the seed, and its numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from nnsight.schema.config import CONFIG

from streamtap.engines.loading import load_model
from streamtap.testing.ndif_server import NdifServer, Served
from streamtap.workbench.unified_cache import UnifiedCache

KEY = "11111111-2222-3333-4444-555555555555"
PROMPTS = [
    "The residual stream is",
    "No.",
    "What every block reads, one after another.",
    "Four",
    "Five of them",
]


@pytest.fixture(scope="module")
def ndif() -> Iterator[NdifServer]:
    loaded = load_model("demo", device="cpu", dtype="float32")
    with NdifServer({"demo": Served.over(loaded.model, loaded.tokenizer)}, key=KEY) as server:
        yield server


@pytest.fixture
def cache(ndif: NdifServer, tmp_path: Path) -> Iterator[UnifiedCache]:
    remote: Any = ndif.url
    options: dict[str, Any] = {"backend": "nnsight", "remote": remote, "api_key": KEY, "batch_size": 4}
    with UnifiedCache(model="demo", layers="all", cache_dir=tmp_path / "cache", **options) as opened:
        yield opened


def test_the_demo_model_over_the_wire_is_the_demo_model_here(
    cache: UnifiedCache, ndif: NdifServer, tmp_path: Path
) -> None:
    stats = cache.warmup(PROMPTS)
    taken = len(ndif.jobs)
    again = cache.warmup(PROMPTS)

    assert (stats.activations_extracted, again.activations_extracted) == (len(PROMPTS), 0)
    assert len(ndif.jobs) == taken == 2  # batch_size 4
    with UnifiedCache(model="demo", layers="all", dtype="float32", cache_dir=tmp_path / "local") as local:
        local.warmup(PROMPTS)
        for layer in cache.layer_indices:
            mine = cache.activations(PROMPTS, layer).astype(np.float64)
            right = local.activations(PROMPTS, layer).astype(np.float64)
            assert (np.linalg.norm(mine - right, axis=1) <= 4e-3 * np.linalg.norm(right, axis=1)).all()
        assert np.allclose(cache.get_perplexity(PROMPTS), local.get_perplexity(PROMPTS), rtol=1e-4, equal_nan=True)


def test_a_way_that_fails_is_tried_as_often_as_the_cache_is_told(cache: UnifiedCache, ndif: NdifServer) -> None:
    from streamtap.errors import TransferFailed

    ndif.fail("http")
    with pytest.raises(TransferFailed):
        cache.warmup(PROMPTS, max_retries=0)

    assert cache.warmup(PROMPTS, max_retries=0).activations_extracted == len(PROMPTS)


def test_remote_true_without_a_key_is_said_clearly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from streamtap.errors import MissingAuthorization

    monkeypatch.setattr(CONFIG.API, "APIKEY", None)
    with (
        UnifiedCache("org/model", backend="nnsight", remote=True, cache_dir=tmp_path) as cache,
        pytest.raises(MissingAuthorization, match="set NDIF_API_KEY"),
    ):
        cache.warmup(["a text"])
