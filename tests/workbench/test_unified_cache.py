from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from streamtap.engines.base import Engine
from streamtap.engines.transformers import TransformersEngine
from streamtap.errors import (
    EmptyPrompt,
    InvalidInput,
    InvalidLayers,
    InvalidPositions,
    InvalidPrompt,
    PoolingMismatch,
    PromptTooLong,
)
from streamtap.pooling import pool
from streamtap.testing.fake_engine import FakeEngine
from streamtap.testing.models import tiny_model
from streamtap.testing.reference import plain_logits, plain_rows
from streamtap.testing.tokenizers import tiny_tokenizer
from streamtap.workbench.unified_cache import UnifiedCache

DTYPES = ("float32", "bfloat16", "float16", "float64")
# Of different lengths, with two repeats, and the longest neither first nor last.
PROMPTS = ["The sky", "is", "blue at noon, as a rule", "is", "and red", "in the evening", "The sky", "so"]
OpenCache = Callable[..., UnifiedCache]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def open_cache(tmp_path: Path, engine: FakeEngine) -> OpenCache:
    def opened(model: Any = engine, **options: Any) -> UnifiedCache:
        return UnifiedCache(model, **{"cache_dir": tmp_path, "progress": False, **options})

    return opened


def tokens_of(engine: FakeEngine, prompt: Any) -> list[int]:
    text = isinstance(prompt, str)
    return engine.tokenizer.tokenizer(prompt)["input_ids"] if text else list(prompt)


def pooled(engine: FakeEngine, prompts: list[Any], layer: int, pooling: str = "last_token") -> np.ndarray[Any, Any]:
    raw = [engine.rows(tokens_of(engine, prompt), layer) for prompt in prompts]
    offsets = np.concatenate([[0], np.cumsum([len(each) for each in raw])])
    return pool(np.concatenate(raw), offsets, pooling)


def same_bits(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


def test_the_sample_prints_as_it_says(open_cache: OpenCache) -> None:
    stats = open_cache(layers="all", cache_pooled=True, pooling="last_token", batch_size=8).warmup(PROMPTS)

    seconds = f"{stats.elapsed_seconds:.1f}"
    assert str(stats) == (
        f"WarmupStats(total=8, activations=0 cached + 8 extracted, perplexity=0 cached + 8 extracted, time={seconds}s)"
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pooling", ["last_token", "first_token", "mean", "max"])
def test_values_are_the_engines_to_the_bit_and_in_order(dtype: str, pooling: str, open_cache: OpenCache) -> None:
    engine = FakeEngine(dtype=dtype)
    for _ in range(2):  # made, and then read
        cache = open_cache(engine, pooling=pooling)
        cache.warmup(PROMPTS)
        for layer in range(4):
            assert same_bits(cache.activations(PROMPTS, layer), pooled(engine, PROMPTS, layer, pooling))
    backwards = PROMPTS[::-1]
    assert same_bits(cache.activations(backwards, -1), pooled(engine, backwards, 3, pooling))
    assert len(engine.runs) == len(set(PROMPTS))


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_the_plain_models(dtype: str, open_cache: OpenCache) -> None:
    model, tokenizer = tiny_model("llama", dtype=getattr(torch, dtype)), tiny_tokenizer()
    engine = TransformersEngine(model, tokenizer)
    cache = open_cache(engine, exact=True, cache_logits=True)
    cache.warmup(PROMPTS)
    for layer in range(3):
        plain = [plain_rows(model, tokenizer(prompt)["input_ids"])[layer][-1] for prompt in PROMPTS]
        found = cache.activations(PROMPTS, layer)
        assert found.dtype.name == dtype
        np.testing.assert_array_equal(found.astype(np.float64), torch.stack(plain).double().numpy())
    logits = torch.stack([plain_logits(model, tokenizer(prompt)["input_ids"])[-1] for prompt in PROMPTS])
    tolerance = {"float32": 1e-5, "float64": 1e-5}.get(dtype, 0.1)
    np.testing.assert_allclose(cache.get_logits(PROMPTS).values, logits.float().numpy(), rtol=tolerance, atol=tolerance)


def test_batches_agree_with_the_plain_model(open_cache: OpenCache) -> None:
    model, tokenizer = tiny_model("gpt2"), tiny_tokenizer()
    cache = open_cache(TransformersEngine(model, tokenizer), cache_pooled=False)
    acts = cache.rows(PROMPTS)
    for i, prompt in enumerate(PROMPTS):
        plain = plain_rows(model, tokenizer(prompt)["input_ids"])
        for layer, rows in acts.prompt(i).items():
            gap = np.linalg.norm(rows - plain[layer].numpy(), axis=1) / np.linalg.norm(plain[layer].numpy(), axis=1)
            assert gap.max() <= 5e-5


def test_what_is_there_is_not_run_again(engine: FakeEngine, open_cache: OpenCache) -> None:
    open_cache(layers=[2], compute_perplexity=False).warmup(PROMPTS[:3])
    first = len(engine.runs)
    stats = open_cache(layers="all", compute_perplexity=False).warmup(PROMPTS)
    again = open_cache(layers="1-2", compute_perplexity=False).warmup(PROMPTS)

    asked = {run.token_ids: run.layers for run in engine.runs[first:]}
    old = {tuple(tokens_of(engine, prompt)) for prompt in PROMPTS[:3]}
    assert first == 3
    assert len(asked) == len(engine.runs) - first == len(set(PROMPTS))
    assert all(layers == ((0, 1, 3) if tokens in old else (0, 1, 2, 3)) for tokens, layers in asked.items())
    assert (stats.activations_cached, stats.activations_extracted) == (0, 8)
    assert (again.activations_cached, again.activations_extracted, again.cache_hit_rate) == (8, 0, 1.0)
    for layer in range(4):
        assert same_bits(open_cache().activations(PROMPTS, layer), pooled(engine, PROMPTS, layer))


def test_scores_are_made_without_the_rows_that_are_there(engine: FakeEngine, open_cache: OpenCache) -> None:
    open_cache(compute_perplexity=False).warmup(PROMPTS[:3])
    first = len(engine.runs)
    stats = open_cache(token_perplexity=True).warmup(PROMPTS[:5])

    assert (stats.activations_cached, stats.activations_extracted) == (4, 1)  # "is" stands there twice
    assert (stats.perplexity_cached, stats.perplexity_extracted) == (0, 5)
    kinds = {(run.layers, run.scores) for run in engine.runs[first:]}
    assert kinds == {((), ("perplexity", "token_nll")), ((0, 1, 2, 3), ("perplexity", "token_nll"))}


def test_rows_are_made_without_the_scores_that_are_there(engine: FakeEngine, open_cache: OpenCache) -> None:
    open_cache(layers=[], token_perplexity=True).warmup(PROMPTS[:3])
    stats = open_cache(layers=[1], token_perplexity=True, cache_logits=True).warmup(PROMPTS[:3])

    assert {(run.layers, run.scores) for run in engine.runs} == {((), ("perplexity", "token_nll")), ((1,), ("logits",))}
    assert (stats.perplexity_cached, stats.perplexity_extracted) == (3, 0)
    assert (stats.logits_cached, stats.logits_extracted) == (0, 3)


def test_a_cache_without_layers_keeps_scores_only(engine: FakeEngine, open_cache: OpenCache) -> None:
    stats = [open_cache(layers=[]).warmup(PROMPTS) for _ in range(2)]

    assert [(each.activations_cached, each.activations_extracted) for each in stats] == [(0, 0), (0, 0)]
    assert [(each.perplexity_cached, each.perplexity_extracted) for each in stats] == [(0, 8), (8, 0)]
    assert len(engine.runs) == len(set(PROMPTS))
    assert open_cache(layers=[], compute_perplexity=False).warmup(PROMPTS).total_prompts == 8
    with pytest.raises(InvalidInput, match="no layers"):
        open_cache(layers=[]).rows(PROMPTS)


def test_reading_a_layer_that_is_missing_makes_that_layer(engine: FakeEngine, open_cache: OpenCache) -> None:
    cache = open_cache(layers=[1])
    cache.warmup(PROMPTS)
    first = len(engine.runs)

    assert same_bits(cache.activations(PROMPTS, 3), pooled(engine, PROMPTS, 3))
    assert {(run.layers, run.scores) for run in engine.runs[first:]} == {((3,), ())}


def test_perplexity(engine: FakeEngine, open_cache: OpenCache) -> None:
    prompts = [*PROMPTS, [5]]
    for _ in range(2):
        cache = open_cache(layers=[0], token_perplexity=True)
        found, each = cache.get_perplexity(prompts), cache.get_token_perplexity(prompts)
        assert (found.dtype, found.shape) == (np.dtype(np.float64), (9, 3))
        np.testing.assert_array_equal(found, [engine.perplexity(tokens_of(engine, prompt)) for prompt in prompts])
        assert np.isnan(found[-1]).all()
        for prompt, values in zip(prompts, each, strict=True):
            np.testing.assert_array_equal(values, np.exp(engine.losses(tokens_of(engine, prompt))))
    assert [len(values) for values in each][-2:] == [2, 0]


@pytest.mark.parametrize("top_k", [None, 5, 200])
@pytest.mark.parametrize("where", ["last", "all"])
def test_logits(where: str, top_k: int | None, engine: FakeEngine, open_cache: OpenCache) -> None:
    options = {"cache_logits": True, "logit_top_k": top_k, "logit_positions": where, "layers": [0]}
    for _ in range(2):
        found = open_cache(**options).get_logits(PROMPTS)
        whole = [engine.logits(tokens_of(engine, prompt)) for prompt in PROMPTS]
        whole = whole if where == "all" else [each[-1:] for each in whole]
        np.testing.assert_array_equal(np.diff(found.offsets), [len(each) for each in whole])
        values = np.concatenate(whole)
        if top_k is None:
            assert found.ids is None
            np.testing.assert_array_equal(found.values, values)
        else:
            assert found.ids is not None
            np.testing.assert_array_equal(found.values, -np.sort(-values, axis=1)[:, :top_k])
            np.testing.assert_array_equal(np.take_along_axis(values, found.ids.astype(int), 1), found.values)


def test_all_layers_side_by_side(engine: FakeEngine, open_cache: OpenCache) -> None:
    flat, mask = open_cache(layers=[1, 3]).get_activations(PROMPTS)

    assert mask is None
    assert same_bits(flat, np.concatenate([pooled(engine, PROMPTS, layer) for layer in (1, 3)], axis=1))


def test_all_layers_side_by_side_and_padded(engine: FakeEngine, open_cache: OpenCache) -> None:
    flat, mask = open_cache(layers=[1, 3], cache_pooled=False).get_activations(PROMPTS)

    lengths = [len(tokens_of(engine, prompt)) for prompt in PROMPTS]
    assert mask is not None
    assert flat.shape == (8, max(lengths), 2 * engine.hidden)
    assert mask.sum(axis=1).tolist() == lengths
    assert not flat[~mask].any()
    for i, prompt in enumerate(PROMPTS):
        np.testing.assert_array_equal(flat[i, : lengths[i], :8], engine.rows(tokens_of(engine, prompt), 1))
        np.testing.assert_array_equal(flat[i, : lengths[i], 8:], engine.rows(tokens_of(engine, prompt), 3))


def test_rows_say_on_which_token_they_stand(engine: FakeEngine, open_cache: OpenCache) -> None:
    tokens = [tokens_of(engine, prompt) for prompt in PROMPTS]
    for _ in range(2):
        acts = open_cache(cache_pooled=False, layers=[2]).rows(PROMPTS)
        assert acts.token_ids.tolist() == list(chain.from_iterable(tokens))
        assert acts.positions.tolist() == list(chain.from_iterable(range(len(each)) for each in tokens))
        assert acts.index.tolist() == list(range(8))
        assert acts.provenance == engine.provenance
        last = open_cache(layers=[2], pooling="last_token", cache_dir=open_cache().store.root / "other").rows(PROMPTS)
        assert last.positions.tolist() == [len(each) - 1 for each in tokens]
        assert last.token_ids.tolist() == [each[-1] for each in tokens]


@pytest.mark.parametrize("pooled_rows", [True, False])
def test_no_prompts_give_empty_arrays(pooled_rows: bool, engine: FakeEngine, open_cache: OpenCache) -> None:
    cache = open_cache(cache_pooled=pooled_rows, token_perplexity=True, cache_logits=True)

    assert cache.warmup([]).total_prompts == 0
    assert cache.activations([], 1).shape == (0, 8)
    assert cache.rows([]).acts[2].shape == (0, 8)
    assert cache.get_activations([])[0].shape == ((0, 32) if pooled_rows else (0, 0, 32))
    assert cache.get_perplexity([]).shape == (0, 3)
    assert cache.get_token_perplexity([]) == []
    assert cache.get_logits([]).values.shape == (0, 97)
    assert engine.runs == []


def test_another_pooling_is_refused_with_both_names(engine: FakeEngine, open_cache: OpenCache) -> None:
    cache = open_cache(pooling="last_token")
    cache.warmup(PROMPTS)
    first = len(engine.runs)

    for ask in (
        lambda: cache.activations(PROMPTS, 1, pooling="mean"),
        lambda: open_cache(pooling="mean").activations(PROMPTS, 1),
        lambda: open_cache(pooling="mean").rows(PROMPTS),
    ):
        with pytest.raises(PoolingMismatch, match="'mean' was asked for, but 8 of 8 prompts .* 'last_token' only"):
            ask()
    with pytest.raises(PoolingMismatch, match=r"cache_pooled=False\)\.warmup"):
        open_cache(cache_pooled=False).rows(PROMPTS)
    assert len(engine.runs) == first
    assert open_cache(pooling="mean").warmup(PROMPTS).activations_extracted == 8
    assert same_bits(open_cache(pooling="mean").activations(PROMPTS, 1), pooled(engine, PROMPTS, 1, "mean"))
    # Prompts that no set has are extracted beside those that this pooling has.
    cache.warmup(["new"])
    assert open_cache(pooling="mean").activations([*PROMPTS, "new"], 1).shape == (9, 8)


def test_an_unpooled_cache_stays_unpooled_when_it_is_read_first(engine: FakeEngine, open_cache: OpenCache) -> None:
    cache = open_cache(cache_pooled=False)
    for pooling in ("mean", "max", "first_token", "last_token"):
        assert same_bits(cache.activations(PROMPTS, 1, pooling=pooling), pooled(engine, PROMPTS, 1, pooling))

    assert len(engine.runs) == len(set(PROMPTS))
    assert len(cache.rows(PROMPTS, [1]).token_ids) == sum(len(tokens_of(engine, prompt)) for prompt in PROMPTS)


@pytest.mark.parametrize(
    ("bad", "error", "names"),
    [
        ("", EmptyPrompt, "prompt 9"),
        ([], EmptyPrompt, "prompt 9"),
        ([5, 97], InvalidPrompt, "prompt 9 holds token id 97"),
        ("x" * 80, PromptTooLong, "prompt 9 has 81 tokens"),
        ([{"role": "user"}], InvalidPrompt, "prompt 9"),
        (7.5, InvalidPrompt, "prompt 9"),
    ],
)
def test_a_prompt_that_cannot_be_run_is_named_before_any_work(
    bad: Any, error: type[Exception], names: str, engine: FakeEngine, open_cache: OpenCache
) -> None:
    cache = open_cache()
    cache.warmup(PROMPTS[:2])
    first = len(engine.runs)

    for ask in (cache.warmup, cache.get_perplexity, lambda prompts: cache.activations(prompts, 1)):
        with pytest.raises(error, match=names):
            ask([*PROMPTS, "new", bad, "newer"])
    assert len(engine.runs) == first


@pytest.mark.parametrize("positions", [[4], "3:", "5:6"])
def test_a_prompt_without_the_positions_is_named_before_any_work(
    positions: Any, engine: FakeEngine, open_cache: OpenCache
) -> None:
    cache = open_cache(positions=positions)
    cache.warmup(["longest", "longer"])
    first = len(engine.runs)

    with pytest.raises(InvalidPositions, match="prompt 4: position"):
        cache.warmup(["longest", "longest", "longish", "longish", "a", "longer"])
    assert len(engine.runs) == first
    assert cache.get_perplexity(["a"]).shape == (1, 3)  # which no position decides


def test_arguments_that_mean_nothing_are_refused(open_cache: OpenCache) -> None:
    cache = open_cache(compute_perplexity=False)
    with pytest.raises(InvalidInput, match=r"names 2.*rows\(\)"):
        cache.activations(PROMPTS, [1, 2])  # type: ignore[arg-type]
    with pytest.raises(InvalidLayers, match="layer 4 is not in the model"):
        cache.activations(PROMPTS, 4)
    with pytest.raises(InvalidInput, match=r"use rows\(\)"):
        cache.activations(PROMPTS, 1, pooling="none")
    with pytest.raises(InvalidInput, match="pooling must be one of"):
        cache.activations(PROMPTS, 1, pooling="median")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="one string"):
        cache.warmup("The sky")
    for ask, made_with in (
        (cache.get_perplexity, "compute_perplexity=True"),
        (cache.get_token_perplexity, "token_perplexity=True"),
        (cache.get_logits, "cache_logits=True"),
    ):
        with pytest.raises(InvalidInput, match=made_with):
            ask(PROMPTS)


def test_the_with_block_closes_the_store_and_leaves_the_engine(engine: FakeEngine, open_cache: OpenCache) -> None:
    with open_cache() as cache:
        cache.warmup(PROMPTS)
    cache.close()

    assert isinstance(engine, Engine)
    assert not engine.closed
    with open_cache() as again:
        assert again.warmup(PROMPTS).activations_extracted == 0


@pytest.mark.parametrize("kind", ["fake", "transformers"])
def test_threads_may_share_a_cache(kind: str, open_cache: OpenCache) -> None:
    fake = FakeEngine(batch_size=2)
    engine: Any = fake if kind == "fake" else TransformersEngine(tiny_model("llama"), tiny_tokenizer(), batch_size=2)
    cache = open_cache(engine)
    expected = {
        layer: open_cache(engine, cache_dir=cache.store.root / "b").activations(PROMPTS, layer) for layer in (0, 1, 2)
    }
    found: dict[int, Any] = {}

    def ask(number: int) -> None:
        cache.warmup(PROMPTS[number % 4 :])
        found[number] = cache.activations(PROMPTS, number % 3)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list(range(6))
    for number, rows in found.items():
        np.testing.assert_allclose(rows, expected[number % 3], rtol=1e-4, atol=1e-4)


def test_a_warm_run_asks_the_index_a_few_times_only(open_cache: OpenCache) -> None:
    prompts = [f"statement {number}" for number in range(4000)]
    engine = FakeEngine(n_layers=1, hidden=4, batch_size=500)
    open_cache(engine, compute_perplexity=False).warmup(prompts)
    cache, statements = open_cache(engine, compute_perplexity=False), []
    cache.store._index._db.set_trace_callback(statements.append)

    assert cache.warmup(prompts).activations_cached == 4000
    assert len(statements) < 60
