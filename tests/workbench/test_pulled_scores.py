from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from streamtap.dataset.names import INDEX
from streamtap.workbench.open_dataset import fetch_dataset_metadata

Bench = Any
MODEL = "example/SmolLM2-135M-Instruct-dequant"
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not record"),
    pytest.mark.filterwarnings("ignore:.*older format"),
]


@pytest.mark.parametrize("sample", ["v2-pooled-logits-ppl", "v1-2-pooled-logits", "v2-upgraded-from-v1-2"])
@pytest.mark.usefixtures("no_model")
def test_scores_of_another_library_are_served(sample: str, bench: Bench, expected: dict[str, Any]) -> None:
    where = bench.sample(sample)
    bench.pull(where)
    prompts = fetch_dataset_metadata(where).prompts
    cache = bench.cache(MODEL, "pulled", layers=[15], cache_logits=True, logit_top_k=10, token_perplexity=True)

    assert cache.warmup(prompts).perplexity_extracted == 0
    logits = cache.get_logits(prompts)
    assert np.array_equal(logits.values, expected[f"{sample}/logits_topk.values"])
    assert np.array_equal(logits.ids, expected[f"{sample}/logits_topk.indices"])
    table = pq.read_table(where / INDEX)
    wanted = np.stack(
        [np.array(table[f"perplexity_{name}"].to_pylist(), "f8") for name in ("mean", "min", "max")], axis=1
    )
    single = [len(ids) == 1 for ids in table["token_ids"].to_pylist()]
    wanted[single] = np.nan
    assert np.array_equal(cache.get_perplexity(prompts), wanted, equal_nan=True)
    for found, told in zip(cache.get_token_perplexity(prompts), table["token_perplexity"].to_pylist(), strict=True):
        assert np.allclose(found, told, rtol=1e-5)


@pytest.mark.usefixtures("no_model")
def test_scores_that_some_prompts_lack_are_stored_for_the_others(bench: Bench) -> None:
    prompts = ["The sky", "is", "blue"]
    bench.fill(prompts, compute_perplexity=False)
    source = bench.fill(prompts[1:], token_perplexity=True)
    bench.pull(bench.push(prompts))
    cache = bench.cache("org/fake", "pulled", token_perplexity=True)

    assert np.array_equal(cache.get_perplexity(prompts[1:]), source.get_perplexity(prompts[1:]))
    for found, wanted in zip(
        cache.get_token_perplexity(prompts[1:]), source.get_token_perplexity(prompts[1:]), strict=True
    ):
        assert np.array_equal(found, wanted)
    engine = bench.engine()
    stats = bench.cache(engine, "pulled", token_perplexity=True).warmup(prompts)
    assert (stats.perplexity_cached, stats.perplexity_extracted, len(engine.runs)) == (2, 1, 1)


@pytest.mark.usefixtures("no_model")
def test_a_prompt_of_one_token_has_no_perplexity(bench: Bench) -> None:
    chat = [{"role": "user", "content": "x"}]
    engine = bench.engine()
    engine.tokenizer.tokenizer.chat_template = "x"
    engine.tokenizer.tokenizer.apply_chat_template = lambda *_, **__: "x"
    source = bench.fill([chat, "The sky"], engine, token_perplexity=True)
    bench.pull(bench.push([chat, "The sky"]))
    cache = bench.cache("org/fake", "pulled", token_perplexity=True)

    assert cache.warmup([chat, "The sky"]).perplexity_extracted == 0
    assert np.isnan(cache.get_perplexity([chat])).all()
    assert np.array_equal(
        cache.get_perplexity([chat, "The sky"]), source.get_perplexity([chat, "The sky"]), equal_nan=True
    )
    assert [len(each) for each in cache.get_token_perplexity([chat, "The sky"])] == [0, 7]
