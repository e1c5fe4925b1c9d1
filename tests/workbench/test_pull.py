"""Datasets of ours, pulled to where neither the model nor its tokenizer is."""

from __future__ import annotations

import json
import shutil
import warnings
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streamtap.cache import PartWriter
from streamtap.cache.parts import FOLDER
from streamtap.dataset.names import INDEX
from streamtap.engines.transformers import TransformersEngine
from streamtap.errors import DatasetDamaged, InvalidInput, InvalidLayers, NotCached, NotInDataset, PoolingMismatch
from streamtap.testing.models import tiny_model
from streamtap.testing.tokenizers import tiny_tokenizer
from streamtap.workbench.dataset_rows import load_activations
from streamtap.workbench.unified_cache import UnifiedCache

Bench = Any
MODEL = "org/fake"
CHAT = [{"role": "user", "content": "Why is the sky blue?"}]
LONG = "abcdefgh" * 12
PROMPTS = ["The sky", "is blue at noon", "x", CHAT, "and red", "is blue at noon"]
SCORES: dict[str, Any] = {"cache_logits": True, "logit_top_k": 3, "token_perplexity": True}


@pytest.fixture(autouse=True)
def nothing_is_said() -> Any:
    """Whatever is known of our own datasets needs no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def same_rows(left: UnifiedCache, right: UnifiedCache, prompts: list[Any]) -> bool:
    mine, theirs = left.rows(prompts), right.rows(prompts)
    columns = [(mine.acts[layer], theirs.acts[layer]) for layer in theirs.layers]
    columns += [(getattr(mine, name), getattr(theirs, name)) for name in ("offsets", "token_ids", "positions")]
    is_equal = all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in columns)
    return is_equal and mine.provenance == theirs.provenance and mine.layers == theirs.layers


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pooling": "mean"},
        {"pooling": "first_token"},
        {"cache_pooled": False},
        {"positions": "-2:", "pooling": "max"},
        {"positions": [0, -1], "pooling": "last_token"},
        {"exclude_special_tokens": True},
        {"exact": True},
    ],
)
@pytest.mark.usefixtures("no_model")
def test_a_new_cache_serves_what_was_pulled_without_a_model(dtype: str, options: Any, bench: Bench) -> None:
    source = bench.fill(PROMPTS, bench.engine(dtype=dtype), **options, **SCORES)
    bench.push(PROMPTS)

    assert bench.pull() == len(PROMPTS)
    cache = bench.cache(MODEL, "pulled", **options, **SCORES)
    stats = cache.warmup(PROMPTS)
    assert (stats.activations_cached, stats.activations_extracted, stats.perplexity_extracted) == (6, 0, 0)
    assert same_rows(cache, source, PROMPTS)
    assert np.array_equal(cache.get_perplexity(PROMPTS), source.get_perplexity(PROMPTS))
    for mine, theirs in zip(cache.get_token_perplexity(PROMPTS), source.get_token_perplexity(PROMPTS), strict=True):
        assert np.array_equal(mine, theirs)
    mine, theirs = cache.get_logits(PROMPTS), source.get_logits(PROMPTS)
    assert np.array_equal(mine.values, theirs.values)
    assert np.array_equal(mine.ids, theirs.ids)
    assert mine.ids.dtype == theirs.ids.dtype


@pytest.mark.usefixtures("no_model")
def test_every_pooling_is_made_of_pulled_rows(bench: Bench) -> None:
    source = bench.fill(PROMPTS, cache_pooled=False)
    bench.pull(bench.push(PROMPTS))
    cache = bench.cache(MODEL, "pulled")

    for pooling in ("last_token", "first_token", "mean", "max"):
        assert np.array_equal(cache.activations(PROMPTS, 2, pooling), source.activations(PROMPTS, 2, pooling))


@pytest.mark.usefixtures("no_model")
def test_layers_and_tensors_choose(bench: Bench) -> None:
    source = bench.fill(PROMPTS, **SCORES)
    where = bench.push(PROMPTS)
    bench.pull(where, layers=[1, -1])
    cache = bench.cache(MODEL, "pulled", layers=[1, 3], **SCORES)
    assert same_rows(cache, bench.cache(source.source.engine(), layers=[1, 3]), PROMPTS)
    assert len(cache.get_logits(PROMPTS).values) == len(PROMPTS)

    bench.pull(where, "only-rows", tensors=["hidden_layers"], layers=[2])
    bench.pull(where, "only-logits", tensors=["logits_topk"])
    kinds = {
        name: sorted({info.identity["kind"] for info in bench.cache(folder=name).store.sets()})
        for name in ("pulled", "only-rows", "only-logits")
    }
    assert kinds == {
        "pulled": ["logits", "perplexity", "rows", "token_nll"],
        "only-rows": ["rows"],
        "only-logits": ["logits"],
    }
    for layers, kind in (([7], InvalidLayers), ([], InvalidLayers)):
        with pytest.raises(kind):
            bench.pull(where, layers=layers)
    for tensors in (["hidden"], []):
        with pytest.raises(InvalidInput, match="tensors"):
            bench.pull(where, tensors=tensors)


@pytest.mark.usefixtures("no_model")
def test_a_dataset_of_logits_alone_is_pulled(bench: Bench) -> None:
    source = bench.fill(PROMPTS, **SCORES)
    bench.pull(bench.push(PROMPTS, tensors=["logits_topk"]))
    cache = bench.cache(MODEL, "pulled", layers=[], **SCORES)

    assert cache.warmup(PROMPTS).logits_cached == len(PROMPTS)
    assert np.array_equal(cache.get_logits(PROMPTS).values, source.get_logits(PROMPTS).values)
    with pytest.raises(NotInDataset, match="holds no activations"):
        bench.pull("set", "other", tensors=["hidden_layers"])


def test_where_the_engine_is_pulled_rows_serve_it_and_only_new_prompts_run(bench: Bench) -> None:
    bench.fill(PROMPTS, **SCORES)
    bench.pull(bench.push(PROMPTS))
    engine = bench.engine()
    cache = bench.cache(engine, "pulled", **SCORES)
    cache.warmup(PROMPTS)
    cache.get_logits(PROMPTS)
    assert engine.runs == []

    stats = cache.warmup([*PROMPTS, "a new one"])
    assert (stats.activations_cached, stats.activations_extracted) == (6, 1)
    assert len(engine.runs) == 1
    assert same_rows(cache, bench.fill([*PROMPTS, "a new one"], folder="fresh", **SCORES), [*PROMPTS, "a new one"])


@pytest.mark.parametrize(
    "other",
    [
        {"named": {"commit": "another"}},
        {"named": {"tokenizer": "another"}},
        {"named": {"quantization": "8bit"}},
        {"named": {"engine": "another"}},
        {"dtype": "float16"},
    ],
)
def test_another_model_is_not_served(other: dict[str, Any], bench: Bench) -> None:
    bench.fill(PROMPTS)
    bench.pull(bench.push(PROMPTS))
    engine = bench.engine(**other)
    bench.fill(PROMPTS, engine, "pulled")

    assert len(engine.runs) == 5  # each prompt once


def test_other_forms_of_the_same_prompts_are_not_served(bench: Bench) -> None:
    prompts = [CHAT, "The sky", LONG]
    bench.fill(prompts, truncate="right", generation_prompt=True)
    bench.pull(bench.push(prompts))
    for options, n_run in (
        ({"truncate": "right", "generation_prompt": True}, 0),
        ({"truncate": "left", "generation_prompt": True}, 1),
        ({"truncate": "right"}, 1),
        ({"truncate": "right", "exact": True}, 3),
        ({"truncate": "right", "pooling": "first_token"}, 3),
    ):
        engine = bench.engine()
        shutil.copytree(bench.root / "pulled", bench.root / "copy")
        bench.fill(prompts, engine, "copy", **options)
        shutil.rmtree(bench.root / "copy")
        assert len(engine.runs) == n_run, options


@pytest.mark.usefixtures("no_model")
def test_forms_that_come_to_the_same_are_served_without_a_model(bench: Bench) -> None:
    """A text has no turn to open, and a short prompt is not cut: neither option hides it from its reader."""
    prompts = [CHAT, "The sky"]
    source = bench.fill(prompts, truncate="right", generation_prompt=True)
    bench.pull(bench.push(prompts))

    for cut in (None, "left", "right"):
        cache = bench.cache(MODEL, "pulled", truncate=cut, generation_prompt=True)
        assert same_rows(cache, source, prompts)
        assert np.array_equal(
            bench.cache(MODEL, "pulled", truncate=cut).activations(["The sky"], 1), source.activations(["The sky"], 1)
        )


def test_forms_that_differ_are_not_confused_without_a_model(bench: Bench) -> None:
    prompts = [CHAT, LONG]
    bench.fill(prompts, truncate="right", generation_prompt=True)
    bench.pull(bench.push(prompts))
    for options, prompt in (({}, CHAT), ({"truncate": "left"}, LONG), ({}, LONG), ({}, json.dumps(CHAT))):
        with pytest.raises(NotCached, match="only rows that were pulled are here"):
            bench.cache(MODEL, "pulled", **options).activations([prompt], 1)


def test_both_forms_of_a_chat_lie_side_by_side(bench: Bench) -> None:
    caches = [bench.fill([CHAT], generation_prompt=opened) for opened in (False, True)]
    for opened in (False, True):
        bench.pull(bench.push([CHAT], f"set-{opened}", generation_prompt=opened))
    for opened, source in zip((False, True), caches, strict=True):
        assert same_rows(bench.cache(MODEL, "pulled", generation_prompt=opened), source, [CHAT])


@pytest.mark.parametrize(
    ("ask", "what"),
    [
        (lambda cache: cache.warmup([*PROMPTS, "not pulled"]), ""),
        (lambda cache: cache.activations(["not pulled"], 1), ""),
        (lambda cache: cache.activations(PROMPTS, 3), "6 of 6 prompts lack layer 3; "),
        (lambda cache: cache.rows([[5, 6, 7]], [1]), "1 of 1 prompts lack layer 1; "),
        (lambda cache: cache.rows(["x"], "all"), "1 of 1 prompts lack layers 0, 2, 3; "),
        (lambda cache: cache.get_perplexity(["not pulled"]), ""),
        (lambda cache: cache.get_token_perplexity(PROMPTS), "6 of 6 prompts lack token_nll; "),
    ],
)
def test_what_was_not_pulled_is_one_clear_error(ask: Any, what: str, bench: Bench) -> None:
    bench.fill(PROMPTS)
    bench.pull(bench.push(PROMPTS), layers=[1])
    cache = bench.cache(MODEL, "pulled", layers=[1], token_perplexity=True)
    with pytest.raises(NotCached) as raised:
        ask(cache)

    said = str(raised.value)
    assert said.startswith(f"{what}of org/fake only rows that were pulled are here; others were asked for, and the mod")
    assert said.endswith("Pull what lacks, or bring the model to this machine.")
    assert "not pulled" not in said
    assert len(cache.activations(PROMPTS, 1)) == len(PROMPTS)  # it goes on serving what is there


def test_another_pooling_than_the_pulled_one_is_named(bench: Bench) -> None:
    bench.fill(PROMPTS)
    bench.pull(bench.push(PROMPTS))
    with pytest.raises(PoolingMismatch, match="'mean' was asked for, but 6 of 6 prompts are stored with 'last_token'"):
        bench.cache(MODEL, "pulled", pooling="mean").activations(PROMPTS, 1)


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize(
    ("argument", "values"),
    [("dtype", ["bfloat16", "float32"]), ("revision", ["c0ffee", "decade"])],
)
def test_of_several_pulled_models_of_a_name_the_caller_picks(argument: str, values: list[str], bench: Bench) -> None:
    sources = []
    for value in values:
        named = {"commit" if argument == "revision" else argument: value} if argument != "dtype" else {}
        engine = bench.engine(named=named, **({"dtype": value} if argument == "dtype" else {}))
        sources.append(bench.fill(PROMPTS, engine, value))
        bench.pull(bench.push(PROMPTS, f"set-{value}", value))

    with pytest.raises(InvalidInput, match=f"2 different models called {MODEL} were pulled: .*{argument}=") as raised:
        bench.cache(MODEL, "pulled").activations(PROMPTS, 1)
    assert all(f"{argument}={value!r}" in str(raised.value) for value in values)
    for value, source in zip(values, sources, strict=True):
        assert same_rows(bench.cache(MODEL, "pulled", **{argument: value}), source, PROMPTS)


@pytest.mark.usefixtures("no_model")
def test_the_name_may_be_a_path_of_the_machine_that_published(bench: Bench) -> None:
    name = "/models/of/somebody/llama"
    source = bench.fill(PROMPTS, bench.engine(named={"model": name}))
    bench.pull(bench.push(PROMPTS, model=name))

    assert same_rows(bench.cache(name, "pulled"), source, PROMPTS)
    with pytest.raises(InvalidInput, match="neither a folder"):
        bench.cache(name, "empty").warmup(PROMPTS)


@pytest.mark.usefixtures("no_model")
def test_pulled_rows_of_the_demo_model_do_not_unpack_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    source = bench.fill(PROMPTS, bench.engine(named={"model": "demo"}))
    bench.pull(bench.push(PROMPTS, model="demo"))
    monkeypatch.setenv("STREAMTAP_CACHE_DIR", str(bench.root / "empty"))

    assert same_rows(bench.cache("demo", "pulled"), source, PROMPTS)
    assert not (bench.root / "empty" / "models").exists()


def test_pulling_again_writes_nothing_again(bench: Bench, files_of: Any) -> None:
    bench.fill(PROMPTS, **SCORES)
    where = bench.push(PROMPTS)
    bench.pull(where)
    before = files_of(bench.root / "pulled" / FOLDER)
    for options in ({}, {"overwrite": True}, {"layers": [1]}):
        assert bench.pull(where, **options) == len(PROMPTS)
        assert files_of(bench.root / "pulled" / FOLDER) == before


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("n_appends", [0, 1, 2, 5])
def test_a_pull_that_was_killed_is_whole_the_next_time(
    n_appends: int, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = bench.fill(PROMPTS, cache_pooled=False, **SCORES)
    where = bench.push(PROMPTS)
    monkeypatch.setattr("streamtap.workbench.pulled_rows._BLOCK_BYTES", 4 * 8 * 4 * 20)
    append, done = PartWriter.append, [0]

    def killed(self: PartWriter, *batch: Any) -> None:
        if done[0] == n_appends:
            raise KeyboardInterrupt
        done[0] += 1
        append(self, *batch)

    with monkeypatch.context() as patch:
        patch.setattr(PartWriter, "append", killed)
        with pytest.raises(KeyboardInterrupt):
            bench.pull(where)
    bench.pull(where)

    cache = bench.cache(MODEL, "pulled", cache_pooled=False, **SCORES)
    assert same_rows(cache, source, PROMPTS)
    assert np.array_equal(cache.get_logits(PROMPTS).values, source.get_logits(PROMPTS).values)
    assert np.array_equal(cache.get_perplexity(PROMPTS), source.get_perplexity(PROMPTS))
    bench.pull(where, "fresh")
    sizes = [
        sorted((str(info.identity["kind"]), info.prompts) for info in bench.cache(folder=name).store.sets())
        for name in ("pulled", "fresh")
    ]
    assert sizes[0] == sizes[1]


@pytest.mark.usefixtures("no_model")
def test_prompts_with_two_labels_are_one_in_the_cache(bench: Bench) -> None:
    source = bench.fill(PROMPTS)
    bench.pull(bench.push(PROMPTS, labels=list(range(6))))

    assert same_rows(bench.cache(MODEL, "pulled"), source, PROMPTS)
    assert {info.prompts for info in bench.cache(folder="pulled").store.sets()} == {5}


def test_columns_that_mean_nothing_are_damage(bench: Bench) -> None:
    bench.fill([CHAT, "The sky"])
    where = bench.push([CHAT, "The sky"], shuffle=False)
    table = pq.read_table(where / INDEX)
    number = table.schema.get_field_index("tokenized_as")
    assert table["tokenized_as"].to_pylist() == [16, 0]
    for values, message in (
        ([16, 6], "tokenized_as .* holds no such rule"),
        ([16, 33], "tokenized_as"),
        ([16, -1], "tokenized_as"),
        ([16, 16], "not the JSON"),
    ):
        changed = table.set_column(number, "tokenized_as", pa.array(values, pa.int8()))
        with pq.ParquetWriter(where / INDEX, changed.schema) as writer:
            writer.write_table(changed)
            writer.add_key_value_metadata(_metadata(table))
        with pytest.raises(DatasetDamaged, match=message):
            bench.pull(where, "damaged")


def _metadata(table: pa.Table) -> dict[str, str]:
    return {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}


def test_from_a_real_model_to_a_machine_without_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = bench.root / "model"
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    source = bench.fill(PROMPTS, str(folder))
    bench.pull(bench.push(PROMPTS, model=str(folder), labels=[0, 1, 0, 1, 0, 1]))
    engine_rows = source.activations(PROMPTS, 1)
    shutil.move(folder, bench.root / "away")
    monkeypatch.setattr(TransformersEngine, "load", lambda *_, **__: pytest.fail("the model was loaded"))

    cache = bench.cache(str(folder), "pulled")
    assert same_rows(cache, source, PROMPTS)
    acts, labels = load_activations(bench.root / "set", 1, PROMPTS, return_labels=True)
    assert np.array_equal(acts[1], engine_rows)
    assert labels.tolist() == [0, 1, 0, 1, 0, 1]

    shutil.move(bench.root / "away", folder)  # here, and never loaded: still not needed for what was pulled
    assert same_rows(bench.cache(str(folder), "pulled"), source, PROMPTS)
    monkeypatch.undo()
    stats = bench.cache(str(folder), "pulled").warmup([*PROMPTS, "new"])
    assert (stats.activations_cached, stats.activations_extracted) == (6, 1)
