from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from streamtap.engines.transformers import TransformersEngine
from streamtap.errors import PromptTooLong
from streamtap.testing.models import tiny_model
from streamtap.testing.tokenizers import tiny_tokenizer
from streamtap.workbench.forecast import forecast
from streamtap.workbench.unified_cache import UnifiedCache

PROMPTS = ["The cat sat.", "Hello", "Hello"]


@pytest.fixture(scope="module")
def engine() -> TransformersEngine:
    return TransformersEngine(tiny_model("llama"), tiny_tokenizer(), name="tiny")


def _cache(engine: TransformersEngine, folder: Path, **options: Any) -> UnifiedCache:
    return UnifiedCache(engine, cache_dir=folder, progress=False, compute_perplexity=False, **options)


def test_it_counts_what_is_missing_and_what_that_takes(engine: TransformersEngine, tmp_path: Path) -> None:
    with _cache(engine, tmp_path, cache_pooled=False) as cache:
        before = forecast(cache, PROMPTS)
        cache.warmup(PROMPTS[:1])
        between = forecast(cache, PROMPTS)
        cache.warmup(PROMPTS)
        after = forecast(cache, PROMPTS)

    row_bytes, tokens, distinct = 3 * 32 * 4, [13, 6, 6], 19
    assert before.n_tokens.tolist() == after.n_tokens.tolist() == tokens
    assert (before.missing, between.missing, after.missing) == (3, 2, 0)
    assert (before.n_prompts, after.estimated_bytes) == (3, 0)
    assert distinct * row_bytes < before.estimated_bytes < 1.2 * distinct * row_bytes
    assert 6 * row_bytes < between.estimated_bytes < 1.3 * 6 * row_bytes
    assert before.free_bytes > before.estimated_bytes


def test_the_estimate_bounds_what_is_written(engine: TransformersEngine, tmp_path: Path) -> None:
    prompts = [[3 + i % 90, 4 + i // 90, 7] for i in range(3000)]
    with _cache(engine, tmp_path) as cache:
        expected = forecast(cache, prompts)
        cache.warmup(prompts)
        payload = sum(each.rows for each in cache.store.sets()) * 3 * 32 * 4

        assert payload < expected.estimated_bytes < 3 * payload


def test_what_was_cut_is_told(engine: TransformersEngine, tmp_path: Path) -> None:
    long = "x" * 300
    with _cache(engine, tmp_path, truncate="left") as cache:
        for _ in range(2):  # tokenised, and then remembered
            found = forecast(cache, ["Hi", long])
            assert (found.n_tokens.tolist(), found.truncated_from.tolist()) == ([3, 256], [0, 301])
    with _cache(engine, tmp_path) as cache, pytest.raises(PromptTooLong, match="prompt 1 has 301 tokens"):
        forecast(cache, ["Hi", long])
