"""Datasets that another library wrote, pulled: what they do not record is said, and their rows go by text."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streamtap.cache.parts import FOLDER
from streamtap.dataset.names import INDEX
from streamtap.errors import DatasetNotFound, InvalidInput, NotCached, NotEnoughSpace, PoolingMismatch
from streamtap.workbench.dataset_rows import load_activations
from streamtap.workbench.open_dataset import fetch_dataset_metadata, fetching, open_dataset

Bench = Any
MODEL = "example/SmolLM2-135M-Instruct-dequant"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
CHAT = [{"role": "user", "content": "Why?"}]
BARE: dict[str, Any] = {"compute_perplexity": False}


@pytest.fixture
def foreign(bench: Bench) -> Any:
    """Pulls samples, checks that each says once what is unknown, and gives their prompts."""

    def pulled(*names: str, **options: Any) -> list[str]:
        prompts: list[str] = []
        for name in names:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                count = bench.pull(bench.sample(name), **options)
                prompts = fetch_dataset_metadata(bench.root / name).prompts
            told = [str(each.message) for each in said if "does not record" in str(each.message)]
            assert len(told) == 1
            assert "does not record its tokenizer, how its tokens were chosen" in told[0]
            assert "matched by model, commit, pooling and text" in told[0]
            assert count == len(prompts)
        return prompts

    return pulled


def twin(bench: Bench, **options: Any) -> Any:
    """An engine of the same model, as the samples name it."""
    named = {"model": MODEL, "commit": COMMIT, **options.pop("named", {})}
    return bench.engine(n_layers=30, hidden=576, context_tokens=200, named=named, **options)


@pytest.mark.parametrize(
    ("sample", "options"),
    [
        ("v1-0-colocated", {}),
        ("v1-2-pooled-logits", {}),
        ("v2-pooled", {}),
        ("v2-pooled-multishard", {}),
        ("v2-pooled-mean", {"pooling": "mean"}),
        ("v2-unlabelled-duplicates", {}),
        ("v2-extraction-bf16", {"cache_pooled": False}),
    ],
)
@pytest.mark.usefixtures("no_model")
def test_rows_are_served_without_a_model(
    sample: str, options: dict[str, Any], bench: Bench, foreign: Any, expected: dict[str, Any]
) -> None:
    prompts = foreign(sample)
    layers = fetch_layers(expected, sample)
    cache = bench.cache(MODEL, "pulled", layers=layers, **options, **BARE)

    assert cache.warmup(prompts).activations_extracted == 0
    for layer in layers:
        found = cache.activations(prompts, layer)
        assert found.dtype == ("bfloat16" if "bf16" in sample else "float32")
        # One prompt of several, and all of its repetitions: the first row is taken for each.
        first = [prompts.index(text) for text in prompts]
        assert np.array_equal(found.astype("f4"), expected[f"{sample}/layer_{layer}"][first])


def fetch_layers(expected: dict[str, Any], sample: str) -> list[int]:
    start = f"{sample}/layer_"
    return sorted(int(key.removeprefix(start)) for key in expected if key.startswith(start))


@pytest.mark.parametrize("pooling", ["last_token", "first_token", "mean", "max"])
@pytest.mark.usefixtures("no_model")
def test_poolings_are_made_of_a_full_sequence(
    pooling: str, bench: Bench, foreign: Any, expected: dict[str, Any]
) -> None:
    prompts = foreign("v2-full-sequence", layers=[15])
    cache = bench.cache(MODEL, "pulled", layers=[15], pooling=pooling, **BARE)
    wanted = load_activations(bench.root / "v2-full-sequence", 15, pooling=pooling)[15]

    assert np.array_equal(cache.activations(prompts, 15), wanted)
    rows = bench.cache(MODEL, "pulled", layers=[15], cache_pooled=False, **BARE).rows(prompts)
    assert np.array_equal(rows.acts[15], expected["v2-full-sequence/tokens/layer_15"])
    assert np.diff(rows.offsets).tolist() == expected["v2-full-sequence/tokens/lengths"].tolist()
    assert set(rows.token_ids) == {-1}


@pytest.mark.parametrize(("sample", "options"), [("v2-pooled", {}), ("v2-full-sequence", {"pooling": "max"})])
def test_they_serve_an_engine_of_the_same_model_and_nothing_runs(
    sample: str, options: dict[str, Any], bench: Bench, foreign: Any
) -> None:
    prompts, engine = foreign(sample), twin(bench)
    cache = bench.cache(engine, "pulled", layers=[15, 29], **options, **BARE)
    assert cache.warmup(prompts).activations_cached == len(prompts)
    wanted = load_activations(bench.root / sample, [15, 29], pooling=options.get("pooling"))
    for layer in (15, 29):
        assert np.array_equal(cache.activations(prompts, layer), wanted[layer])
    assert engine.runs == []

    mixed = [prompts[3], "a new one", prompts[0]]
    found = cache.activations(mixed, 15)
    assert len(engine.runs) == 1
    assert np.array_equal(found[[0, 2]], wanted[15][[3, 0]])
    ids = engine.tokenizer.tokenizer("a new one")["input_ids"]
    if not options:
        assert np.array_equal(found[1], engine.rows(ids, 15)[-1])


@pytest.mark.parametrize(
    ("engine", "options"),
    [
        ({"named": {"commit": "another"}}, {}),
        ({"named": {"model": "org/other"}}, {}),
        ({"named": {"quantization": "8bit"}}, {}),
        ({"dtype": "float16"}, {}),
        ({}, {"exact": True}),
        ({}, {"positions": "-2:"}),
        ({}, {"exclude_special_tokens": True}),
    ],
)
def test_they_serve_nothing_else(engine: dict[str, Any], options: dict[str, Any], bench: Bench, foreign: Any) -> None:
    prompts = foreign("v2-pooled")[:3]
    other = twin(bench, **engine)
    bench.fill(prompts, other, "pulled", layers=[15], **options, **BARE)

    assert len(other.runs) == 3


def test_another_pooling_is_not_served(bench: Bench, foreign: Any) -> None:
    prompts = foreign("v2-pooled", "v2-pooled-mean")[:2]
    engine = twin(bench)
    assert not np.array_equal(
        bench.cache(engine, "pulled", pooling="mean", layers=[15], **BARE).activations(prompts, 15),
        bench.cache(engine, "pulled", layers=[15], **BARE).activations(prompts, 15),
    )
    assert engine.runs == []
    bench.fill(prompts, engine, "pulled", pooling="max", layers=[15], **BARE)
    assert len(engine.runs) == 2


def test_a_text_is_not_taken_for_another_form_of_prompt(bench: Bench) -> None:
    """A dataset names a chat by its JSON, and so may a foreign one name a text."""
    where = bench.sample("v2-unlabelled-duplicates")
    table = pq.read_table(where / INDEX)
    texts = [json.dumps(CHAT), *table["text"].to_pylist()[1:]]
    changed = table.set_column(0, "text", [texts])
    with pq.ParquetWriter(where / INDEX, changed.schema) as writer:
        writer.write_table(changed)
        writer.add_key_value_metadata({k.decode(): v.decode() for k, v in (table.schema.metadata or {}).items()})
    with pytest.warns(UserWarning, match="does not record"):
        bench.pull(where)
    engine = twin(bench)
    cache = bench.cache(engine, "pulled", layers=[15], **BARE)

    ids = engine.tokenizer.tokenizer(json.dumps(CHAT))["input_ids"]
    cache.warmup([json.dumps(CHAT)])
    assert engine.runs == []
    cache.warmup([CHAT, ids])
    assert len(engine.runs) == 2


def test_two_dtypes_of_one_model_are_told_apart(bench: Bench, foreign: Any, expected: dict[str, Any]) -> None:
    prompts = foreign("v2-full-sequence", "v2-extraction-bf16")
    with pytest.raises(InvalidInput, match=r"dtype='bfloat16'; dtype='float32'\. Pick one with dtype="):
        bench.cache(MODEL, "pulled", layers=[15]).activations(prompts, 15)
    for dtype, name in (("float32", "v2-full-sequence"), ("bfloat16", "v2-extraction-bf16")):
        where = bench.root / name
        order = fetch_dataset_metadata(where).prompts
        found = bench.cache(MODEL, "pulled", layers=[15], dtype=dtype, **BARE).activations(order, 15)
        assert np.array_equal(found.astype("f4"), expected[f"{name}/layer_15"])


@pytest.mark.usefixtures("no_model")
def test_datasets_of_one_model_lie_together(bench: Bench, foreign: Any, expected: dict[str, Any]) -> None:
    """The deeper one first, and one of ours with them: none hides what the others have."""
    prompts = foreign("v2-pooled", "v2-unlabelled-duplicates", "v2-pooled-multishard")
    ours = bench.fill(["of ours"], twin(bench), layers=[15, 29], **BARE)
    bench.pull(bench.push(["of ours"], model=MODEL))
    foreign("v2-string-labels")
    cache = bench.cache(MODEL, "pulled", layers=[29], **BARE)

    order = fetch_dataset_metadata(bench.root / "v2-pooled").prompts
    assert np.array_equal(cache.activations(order, 29), expected["v2-pooled/layer_29"])
    assert np.array_equal(cache.activations(["of ours"], 29), ours.activations(["of ours"], 29))
    mixed = [prompts[0], "of ours", prompts[1]]
    assert np.array_equal(cache.activations(mixed, 29)[1], ours.activations(["of ours"], 29)[0])
    duplicates = fetch_dataset_metadata(bench.root / "v2-unlabelled-duplicates").prompts
    assert cache.activations(duplicates, 15).shape == (6, 576)


@pytest.mark.parametrize(
    ("ask", "kind"),
    [
        (lambda cache: cache.activations(["not pulled"], 15), NotCached),
        (lambda cache: cache.warmup(["not pulled"]), NotCached),
        (lambda cache: cache.activations([CHAT], 15), NotCached),
        (lambda cache: cache.get_perplexity(["not pulled"]), NotCached),
    ],
)
def test_what_was_not_pulled_is_one_clear_error(ask: Any, kind: type[Exception], bench: Bench, foreign: Any) -> None:
    foreign("v2-pooled")
    with pytest.raises(kind, match="only rows that were pulled are here; others were asked for"):
        ask(bench.cache(MODEL, "pulled", layers=[15]))


def test_another_pooling_without_a_model_names_the_pulled_one(bench: Bench, foreign: Any) -> None:
    prompts = foreign("v2-pooled-mean")
    with pytest.raises(NotCached, match=r"12 of 12 prompts lack perplexity; of .* only rows that were pulled"):
        bench.cache(MODEL, "pulled", layers=[15], pooling="mean").warmup(prompts)
    with pytest.raises(
        PoolingMismatch, match="'last_token' was asked for, but 12 of 12 prompts are stored with 'mean'"
    ):
        bench.cache(MODEL, "pulled", layers=[15], **BARE).activations(prompts, 15)


def test_overwrite_takes_the_new_rows(bench: Bench, foreign: Any, files_of: Any) -> None:
    prompts = foreign("v2-pooled", layers=[15])
    cache = bench.cache(MODEL, "pulled", layers=[15], **BARE)
    old = cache.activations(prompts, 15)
    before = files_of(bench.root / "pulled" / FOLDER)
    foreign("v2-pooled", layers=[15])
    assert files_of(bench.root / "pulled" / FOLDER) == before

    shard = bench.root / "v2-pooled" / "tensors" / "hidden_layer015_shard000.safetensors"
    change_first_value(shard)
    foreign("v2-pooled", layers=[15])
    assert np.array_equal(cache.activations(prompts, 15), old)
    foreign("v2-pooled", layers=[15], overwrite=True)
    new = bench.cache(MODEL, "pulled", layers=[15], **BARE).activations(prompts, 15)
    assert not np.array_equal(new, old)
    assert np.array_equal(new, load_activations(bench.root / "v2-pooled", 15)[15])


def new_version(where: Path) -> None:
    for shard in (where / "tensors").glob("hidden*.safetensors"):
        change_first_value(shard)


def served(bench: Bench, prompts: list[str], *layers: int, **options: Any) -> dict[int, bytes]:
    cache = bench.cache(MODEL, "pulled", layers=list(layers), **BARE, **options)
    return {layer: cache.activations(prompts, layer).tobytes() for layer in layers}


def published(where: Path, *layers: int, **options: Any) -> dict[int, bytes]:
    acts = load_activations(where, list(layers), **options)
    return {layer: acts[layer].tobytes() for layer in layers}


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.usefixtures("no_model")
def test_overwrite_of_one_layer_brings_the_others_again(is_new: bool, bench: Bench, foreign: Any) -> None:
    prompts, where = foreign("v2-pooled", layers=[15]), bench.root / "v2-pooled"
    if is_new:
        new_version(where)
    foreign("v2-pooled", layers=[29], overwrite=True)

    assert served(bench, prompts, 15, 29) == published(where, 15, 29)


@pytest.mark.usefixtures("no_model")
def test_overwrite_of_nothing_new_takes_nothing_away(bench: Bench, foreign: Any, files_of: Any) -> None:
    others = foreign("v2-string-labels", "v2-pooled")
    others = fetch_dataset_metadata(bench.root / "v2-string-labels").prompts
    before = files_of(bench.root / "pulled" / FOLDER)
    foreign("v2-pooled", overwrite=True)

    assert files_of(bench.root / "pulled" / FOLDER) == before
    assert len(bench.cache(MODEL, "pulled", layers=[15], **BARE).activations(others, 15)) == len(others)


@pytest.mark.parametrize("tensors", [["hidden_layers"], ["logits_topk"], None])
@pytest.mark.usefixtures("no_model")
def test_overwrite_takes_the_new_scores_too(tensors: Any, bench: Bench, foreign: Any) -> None:
    name = "v2-pooled-logits-ppl"
    prompts, where = foreign(name), bench.root / name
    options: dict[str, Any] = {"layers": [15], "cache_logits": True, "logit_top_k": 10, "token_perplexity": True}
    old = bench.cache(MODEL, "pulled", **options)
    old_values = [old.get_logits(prompts).values, old.get_perplexity(prompts)]
    new_version(where)
    for shard in (where / "tensors").glob("logits*.safetensors"):
        change_first_value(shard)
    table = pq.read_table(where / INDEX)
    number = table.schema.get_field_index("perplexity_mean")
    other = pa.array(np.full(len(table), 7.0), table.schema.field(number).type)
    pq.write_table(table.set_column(number, "perplexity_mean", other), where / INDEX)
    with pytest.warns(UserWarning, match="does not record"):
        bench.pull(where, tensors=tensors, overwrite=True)

    assert served(bench, prompts, 15) == published(where, 15)
    cache = bench.cache(MODEL, "pulled", **options)
    new_values = [cache.get_logits(prompts).values, cache.get_perplexity(prompts)]
    for was, now in zip(old_values, new_values, strict=True):
        assert was.shape == now.shape
        assert not np.array_equal(was, now, equal_nan=True)
    assert np.array_equal(new_values[0], load_dataset_logits(where))
    with pytest.warns(UserWarning, match="does not record"):
        bench.pull(where, "fresh")
    fresh = bench.cache(MODEL, "fresh", **options)
    assert np.array_equal(new_values[1], fresh.get_perplexity(prompts), equal_nan=True)


def load_dataset_logits(where: Path) -> Any:
    with fetching(open_dataset(where), show=False) as dataset:
        return dataset.read_logits(dataset.index.logit_places())[0]


@pytest.mark.usefixtures("no_model")
def test_overwrite_that_cannot_be_done_takes_nothing_away(
    bench: Bench, foreign: Any, files_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, where = foreign("v2-pooled", layers=[15]), bench.root / "v2-pooled"
    before, old = files_of(bench.root / "pulled" / FOLDER), served(bench, prompts, 15)
    new_version(where)

    def full(*_: Any) -> None:
        raise NotEnoughSpace("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr("streamtap.cache.space.require_space", full)
        with pytest.raises(NotEnoughSpace):
            foreign("v2-pooled", layers=[15], overwrite=True)
    missing = where / "tensors" / "hidden_layer015_shard000.safetensors"
    content = missing.read_bytes()
    missing.unlink()
    with pytest.raises(DatasetNotFound):
        foreign("v2-pooled", layers=[29], overwrite=True)
    assert files_of(bench.root / "pulled" / FOLDER) == before
    assert served(bench, prompts, 15) == old

    missing.write_bytes(content)
    foreign("v2-pooled", layers=[29], overwrite=True)
    assert served(bench, prompts, 15, 29) == published(where, 15, 29)


@pytest.mark.usefixtures("no_model")
def test_overwrite_heals_rows_that_were_damaged_here(bench: Bench, foreign: Any) -> None:
    prompts, where = foreign("v2-pooled", layers=[15]), bench.root / "v2-pooled"
    part = next((bench.root / "pulled" / FOLDER).glob("*.bin"))
    content = bytearray(part.read_bytes())
    content[content.index(load_activations(where, 15)[15][3].tobytes())] ^= 1
    part.write_bytes(bytes(content))
    foreign("v2-pooled", layers=[15], overwrite=True)

    assert served(bench, prompts, 15) == published(where, 15)


def change_first_value(shard: Path) -> None:
    content = bytearray(shard.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    content[start : start + 4] = np.float32(123.5).tobytes()
    shard.write_bytes(bytes(content))
