"""Which stored rows serve a request: none but the right ones, and every wider one that does (case V29)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamtap.activations import in_asked_order
from streamtap.engines.transformers import TransformersEngine
from streamtap.spec import CaptureSpec
from streamtap.testing.fake_engine import FakeEngine
from streamtap.testing.models import tiny_model
from streamtap.testing.tokenizers import tiny_tokenizer
from streamtap.workbench.unified_cache import UnifiedCache
from streamtap.workbench.wanted import row_identity, serving_sets

PROMPTS = ["The sky", "is", "blue at noon, as a rule", "and red"]
CHATS = [[{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]]
LONG = ["x" * 40 + "y" * 40, "y" * 90]
OpenCache = Callable[..., UnifiedCache]


@pytest.fixture
def open_cache(tmp_path: Path) -> OpenCache:
    def opened(model: Any, **options: Any) -> UnifiedCache:
        return UnifiedCache(model, **{"cache_dir": tmp_path, "progress": False, "token_perplexity": True, **options})

    return opened


def direct(engine: Any, prompts: Any, cache: UnifiedCache, layer: int) -> Any:
    spec = replace(cache.spec, layers=[layer], perplexity=False, token_nll=False)
    return in_asked_order(list(engine.capture(prompts, spec))).acts[layer]


@pytest.mark.parametrize(
    "changed",
    [
        {"named": {"commit": "fake-2"}},
        {"named": {"tokenizer": "characters, with another template"}},
        {"named": {"quantization": "bitsandbytes:0123"}},
        {"named": {"engine": "another kind"}},
        {"dtype": "float16"},
    ],
    ids=str,
)
def test_another_model_gets_rows_of_its_own(changed: dict[str, Any], open_cache: OpenCache) -> None:
    first, second = FakeEngine(), FakeEngine(**changed)
    open_cache(first).warmup(PROMPTS)
    cache = open_cache(second)
    stats = cache.warmup(PROMPTS)

    assert (stats.activations_extracted, stats.perplexity_extracted) == (4, 4)
    np.testing.assert_array_equal(cache.activations(PROMPTS, 1), direct(second, PROMPTS, cache, 1))
    assert open_cache(first).warmup(PROMPTS).activations_cached == 4


@pytest.mark.parametrize(
    "changed",
    [
        {"named": {"model": "the same, by another name"}},
        {"named": {"device": "cuda:1", "engine_version": "9"}},
        {"batch_size": 1},
    ],
    ids=str,
)
def test_what_changes_no_value_is_a_hit(changed: dict[str, Any], open_cache: OpenCache) -> None:
    open_cache(FakeEngine()).warmup(PROMPTS)

    assert open_cache(FakeEngine(**changed)).warmup(PROMPTS).activations_cached == 4


@pytest.mark.parametrize(
    ("before", "after", "prompts"),
    [
        ({}, {"exact": True}, PROMPTS),
        ({"layers": [0, 1]}, {"layers": [1, 2]}, PROMPTS),
        ({}, {"positions": "-2:"}, PROMPTS),
        ({"positions": "-2:"}, {"positions": "-3:"}, PROMPTS),
        ({"positions": "-2:"}, {"positions": "all"}, PROMPTS),
        ({"positions": [0]}, {"positions": lambda token_ids: token_ids > 4}, PROMPTS),
        ({"positions": "role:user"}, {"positions": "role:assistant"}, CHATS),
        ({}, {"exclude_special_tokens": True}, PROMPTS),
        ({"exclude_special_tokens": True}, {}, PROMPTS),
        ({}, {"pooling": "max"}, PROMPTS),
        ({}, {"cache_pooled": False}, PROMPTS),
        ({"truncate": "left"}, {"truncate": "right"}, LONG),
        ({}, {"generation_prompt": True}, CHATS),
    ],
)
def test_another_request_gets_rows_of_its_own(
    before: dict[str, Any], after: dict[str, Any], prompts: Any, open_cache: OpenCache
) -> None:
    engine = FakeEngine()
    open_cache(engine, **{"pooling": "mean", **before}).warmup(prompts)
    cache = open_cache(engine, **{"pooling": "mean", **after})
    stats = cache.warmup(prompts)

    assert stats.activations_extracted == len(prompts)
    for layer in cache.layer_indices:
        np.testing.assert_array_equal(cache.rows(prompts, layer).acts[layer], direct(engine, prompts, cache, layer))
    assert open_cache(engine, **{"pooling": "mean", **before}).warmup(prompts).activations_cached == len(prompts)


def test_truncation_that_cuts_nothing_changes_nothing(open_cache: OpenCache) -> None:
    engine = FakeEngine()
    open_cache(engine, truncate="left").warmup(PROMPTS)

    assert open_cache(engine, truncate="right").warmup(PROMPTS).activations_cached == 4
    assert open_cache(engine).warmup(PROMPTS).activations_cached == 4


def test_other_special_tokens_get_rows_of_their_own(open_cache: OpenCache) -> None:
    model, first, second = tiny_model("llama"), tiny_tokenizer(), tiny_tokenizer()
    second.pad_token = "e"  # a special token from now on, so that it has no row
    options = {"exclude_special_tokens": True, "pooling": "mean", "exact": True}
    open_cache(TransformersEngine(model, first), **options).warmup(PROMPTS)
    cache = open_cache(TransformersEngine(model, second), **options)

    assert cache.warmup(PROMPTS).activations_extracted == 4
    np.testing.assert_array_equal(
        cache.activations(PROMPTS, 1), direct(TransformersEngine(model, second), PROMPTS, cache, 1)
    )


def test_other_weights_under_the_same_name_get_rows_of_their_own(open_cache: OpenCache) -> None:
    engines = [TransformersEngine(tiny_model("llama", seed=seed), tiny_tokenizer(), name="mine") for seed in (0, 1)]
    found = [open_cache(engine).activations(PROMPTS, 1) for engine in engines]

    assert not np.allclose(*found)
    for engine, rows in zip(engines, found, strict=True):
        np.testing.assert_allclose(rows, direct(engine, PROMPTS, open_cache(engine), 1), rtol=1e-4, atol=1e-4)
        assert open_cache(engine).warmup(PROMPTS).activations_extracted == 4  # layers 0 and 2
        assert open_cache(engine).warmup(PROMPTS).activations_cached == 4


@pytest.mark.parametrize("pooling", ["last_token", "first_token", "mean", "max"])
@pytest.mark.parametrize(
    "positions", ["all", "-2:", [0, -1], lambda token_ids: token_ids > 70], ids=lambda value: str(value)[:20]
)
@pytest.mark.parametrize("special", [False, True])
def test_whole_prompts_serve_any_positions_and_pooling(
    pooling: str, positions: Any, special: bool, open_cache: OpenCache
) -> None:
    engine = FakeEngine()
    open_cache(engine, cache_pooled=False).warmup(PROMPTS)
    first = len(engine.runs)
    cache = open_cache(engine, pooling=pooling, positions=positions, exclude_special_tokens=special)
    prompts = [PROMPTS[2], *PROMPTS]

    assert cache.warmup(prompts).activations_cached == 5
    assert cache.warmup(prompts).perplexity_cached == 5
    acts = cache.rows(prompts)
    assert len(engine.runs) == first
    asked = in_asked_order(list(engine.capture(prompts, replace(cache.spec, layers="all", perplexity=False))))
    for layer in range(4):
        np.testing.assert_array_equal(acts.acts[layer], asked.acts[layer])
    np.testing.assert_array_equal(acts.positions, asked.positions)
    np.testing.assert_array_equal(acts.token_ids, asked.token_ids)
    np.testing.assert_array_equal(acts.offsets, asked.offsets)


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_whole_prompts_serve_the_turns_of_a_role(role: str, open_cache: OpenCache) -> None:
    engine = FakeEngine()
    open_cache(engine, cache_pooled=False).warmup(CHATS)
    for _ in range(2):  # tokenised, and then remembered
        cache = open_cache(engine, positions=f"role:{role}", cache_pooled=False)
        assert cache.warmup(CHATS).activations_cached == 1
        text = {"user": "Why?", "assistant": "Because."}[role]
        assert cache.rows(CHATS).token_ids.tolist() == engine.tokenizer.tokenizer(text)["input_ids"][1:]


def test_chosen_rows_serve_their_pooling(open_cache: OpenCache) -> None:
    engine = FakeEngine()
    open_cache(engine, cache_pooled=False, positions="-2:").warmup(PROMPTS)
    first = len(engine.runs)
    cache = open_cache(engine, positions="-2:", pooling="max")

    assert cache.warmup(PROMPTS).activations_cached == 4
    np.testing.assert_array_equal(cache.activations(PROMPTS, 2), direct(engine, PROMPTS, cache, 2))
    assert len(engine.runs) == first + 4  # those of the comparison


@pytest.mark.parametrize("pooling", ["last_token", "first_token", "mean", "max"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pooling_what_is_stored_equals_the_engines_own(dtype: str, pooling: str, open_cache: OpenCache) -> None:
    import torch

    engine = TransformersEngine(tiny_model("llama", dtype=getattr(torch, dtype)), tiny_tokenizer())
    open_cache(engine, cache_pooled=False, exact=True).warmup(PROMPTS)
    cache = open_cache(engine, pooling=pooling, exact=True)
    assert cache.warmup(PROMPTS).activations_cached == 4
    found, own = cache.activations(PROMPTS, 1), direct(engine, PROMPTS, cache, 1)

    assert found.dtype == own.dtype
    if pooling == "mean":  # added up in another order, and rounded once
        step = {"float32": 1e-6, "bfloat16": 2**-7}[dtype]
        np.testing.assert_allclose(found.astype(np.float64), own.astype(np.float64), rtol=step, atol=step)
    else:
        np.testing.assert_array_equal(found.astype(np.float64), own.astype(np.float64))


def test_exact_rows_serve_any_request_and_others_never_an_exact_one(open_cache: OpenCache) -> None:
    engine = FakeEngine()
    open_cache(engine, exact=True, cache_pooled=False).warmup(PROMPTS)
    plain = open_cache(engine, pooling="mean", compute_perplexity=False, token_perplexity=False)
    assert plain.warmup(PROMPTS).activations_cached == 4
    exact = open_cache(engine, pooling="mean", exact=True)
    np.testing.assert_array_equal(plain.activations(PROMPTS, 1), direct(engine, PROMPTS, exact, 1))

    plain.warmup(["a new one"])
    assert open_cache(engine, pooling="mean", exact=True).warmup(["a new one"]).activations_extracted == 1


def test_the_set_that_is_written_is_asked_first() -> None:
    about = FakeEngine().provenance
    spec = CaptureSpec(positions=np.array([0, -1]), pooling="mean")
    found = [(each.pooling, each.choose) for each in serving_sets(about, spec)]

    assert next(serving_sets(about, spec)).identity == row_identity(about, spec)
    assert found == [("none", False), ("mean", False), ("mean", True)] * 2
    assert len(list(serving_sets(about, CaptureSpec(exact=True)))) == 1
