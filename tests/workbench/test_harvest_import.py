"""The rows of a harvest in the cache: as if they had been extracted there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamtap.cache.parts import FOLDER
from streamtap.engines.transformers import TransformersEngine
from streamtap.errors import HarvestDamaged, InvalidInput, InvalidLayers
from streamtap.harvested.joined import JoinedRuns
from streamtap.spec import Projection
from streamtap.testing.models import tiny_model
from streamtap.testing.tokenizers import tiny_tokenizer
from streamtap.workbench.unified_cache import UnifiedCache

Bench = Any
MODEL = "org/fake"
CHAT = [{"role": "user", "content": "Why is the sky blue?"}]
PROMPTS = ["The sky", "is blue at noon", "x", CHAT, "and red", "is blue at noon", "a" * 70]
SAME: dict[str, Any] = {"truncate": "right", "compute_perplexity": False}
OWN = {"dtype": "float32"}


def same_rows(left: UnifiedCache, right: UnifiedCache, prompts: list[Any]) -> bool:
    mine, theirs = left.rows(prompts), right.rows(prompts)
    columns = [(mine.acts[layer], theirs.acts[layer]) for layer in theirs.layers]
    columns += [(getattr(mine, name), getattr(theirs, name)) for name in ("offsets", "token_ids", "positions")]
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in columns)


@pytest.mark.parametrize(
    ("kept", "asked"),
    [
        ({"cache_pooled": False}, {}),
        ({"pooling": "mean"}, {"pooling": "mean"}),
        ({"pooling": "max"}, {"pooling": "max", "compression": "zstd"}),
        ({"pooling": "last_token"}, {"pooling": "last_token"}),
        ({"positions": "last", "cache_pooled": False}, {"positions": "last"}),
        ({"positions": [0, -1], "cache_pooled": False}, {"positions": [0, -1]}),
        ({"positions": "-2:", "pooling": "mean"}, {"positions": "-2:", "pooling": "mean"}),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_has_nothing_left_to_do(dtype: str, kept: Any, asked: Any, bench: Bench) -> None:
    run = bench.harvest(PROMPTS, bench.engine(dtype=dtype), shard_size=3, dtype=dtype, **asked)
    cache = bench.cache(bench.engine(dtype=dtype), **kept, **SAME)

    assert cache.import_harvest(run) == len(PROMPTS)
    stats = cache.warmup(PROMPTS)
    assert (stats.activations_cached, stats.activations_extracted) == (len(PROMPTS), 0)
    assert cache.source.engine().runs == []
    assert same_rows(cache, bench.fill(PROMPTS, bench.engine(dtype=dtype), "other", **kept, **SAME), PROMPTS)


def test_every_row_serves_any_pooling(bench: Bench) -> None:
    cache = bench.cache(**SAME)
    cache.import_harvest(bench.harvest(PROMPTS, **OWN).place.url)
    plain = bench.fill(PROMPTS, folder="other", cache_pooled=False, **SAME)

    for pooling in ("last_token", "first_token", "mean", "max"):
        assert np.array_equal(cache.activations(PROMPTS, 2, pooling), plain.activations(PROMPTS, 2, pooling))
    assert cache.source.engine().runs == []


def test_wider_files_hold_the_models_own_rows(bench: Bench) -> None:
    """Rows of a bfloat16 model in float32 files lose nothing on the way there and back."""
    engine = bench.engine(dtype="bfloat16")
    cache = bench.cache(engine, pooling="mean", **SAME)
    cache.import_harvest(bench.harvest(PROMPTS, engine, pooling="mean", dtype="float32"))
    ran = len(engine.runs)
    plain = bench.fill(PROMPTS, bench.engine(dtype="bfloat16"), "other", pooling="mean", **SAME)

    assert same_rows(cache, plain, PROMPTS)
    assert len(engine.runs) == ran


@pytest.mark.usefixtures("no_model")
def test_it_needs_no_model_for_token_ids(bench: Bench) -> None:
    run = bench.harvest(PROMPTS, **OWN)
    ids = [run.token_ids(i).tolist() for i in range(len(run))]
    cache = bench.cache(MODEL, layers="all", cache_pooled=False, **SAME)
    cache.import_harvest(run)

    assert same_rows(cache, bench.fill(PROMPTS, folder="other", cache_pooled=False, **SAME), ids)
    again = bench.cache(MODEL, layers=[1], cache_pooled=False, **SAME)
    assert np.array_equal(again.rows([ids[0]]).acts[1], run.prompt(0, 1)[1])


def test_layers_choose_and_the_rest_comes_later(bench: Bench) -> None:
    run = bench.harvest(PROMPTS, layers=[0, 2, 3], **OWN)
    cache = bench.cache(layers=[2], cache_pooled=False, **SAME)
    cache.import_harvest(run, layers=[2])
    parts = {file: file.stat().st_mtime_ns for file in (cache.store.root / FOLDER).rglob("*")}
    assert [channel.name for info in cache.store.sets() for channel in info.channels] == ["layer_2"]
    cache.import_harvest(run, layers=2)
    assert {file: file.stat().st_mtime_ns for file in (cache.store.root / FOLDER).rglob("*")} == parts

    cache.import_harvest(run)
    assert same_rows(cache, bench.fill(PROMPTS, folder="other", layers=[2], cache_pooled=False, **SAME), PROMPTS)
    assert cache.rows(PROMPTS, layers=[0, 3]).layers == (0, 3)
    assert cache.source.engine().runs == []
    with pytest.raises(InvalidLayers):
        cache.import_harvest(run, layers=[1])


def test_what_the_cache_has_is_not_read(bench: Bench) -> None:
    run = bench.harvest(PROMPTS, shard_size=2, **OWN)
    cache = bench.fill(PROMPTS, cache_pooled=False, **SAME)
    shard = Path(run.place.url) / "shard_00001.safetensors"
    header = 8 + int.from_bytes(shard.read_bytes()[:8], "little")
    with shard.open("r+b") as file:  # its rows, and not its tokens
        file.seek(header)
        file.write(b"\xff" * 64)
    cache.import_harvest(run)

    assert same_rows(cache, bench.fill(PROMPTS, folder="other", cache_pooled=False, **SAME), PROMPTS)


def test_several_jobs_are_one_harvest(bench: Bench) -> None:
    parts = [bench.harvest(some, where=f"job/{i}", **OWN) for i, some in enumerate((PROMPTS[:3], PROMPTS[3:]))]
    plain = bench.fill(PROMPTS, folder="plain", cache_pooled=False, **SAME)

    cache = bench.cache(cache_pooled=False, **SAME)
    assert cache.import_harvest(JoinedRuns(parts)) == len(PROMPTS)
    assert same_rows(cache, plain, PROMPTS)
    assert cache.source.engine().runs == []


def test_a_real_model_reads_its_harvest_back(bench: Bench) -> None:
    model, tokenizer = tiny_model("llama"), tiny_tokenizer()
    run = bench.harvest(["The sky", "is blue"], TransformersEngine(model, tokenizer), **OWN)
    cache = bench.cache(TransformersEngine(model, tokenizer), "memory", cache_pooled=False, compute_perplexity=False)
    assert cache.import_harvest(run) == 2
    assert cache.warmup(["The sky", "is blue"]).activations_extracted == 0
    with pytest.raises(InvalidInput, match="not the model of this cache"):
        bench.cache(TransformersEngine(tiny_model("llama", seed=1), tokenizer), "other").import_harvest(run)

    folder = bench.root / "model"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    run = bench.harvest(["The sky", "is blue"], TransformersEngine.load(str(folder)), "saved", **OWN)
    cache = bench.cache(str(folder), cache_pooled=False, compute_perplexity=False)
    assert cache.import_harvest(run) == 2
    assert cache.warmup(["The sky", "is blue"]).activations_extracted == 0
    assert np.array_equal(cache.rows(["is blue"]).acts[1], run.prompt(1, 1)[1])


@pytest.mark.parametrize(
    ("engine", "asked", "says"),
    [
        ({}, {"projection": Projection.onto(np.eye(2, 8))}, "products"),
        ({}, {"dtype": "bfloat16"}, "rounded from the model's float32"),
        ({"dtype": "float16"}, {"dtype": "bfloat16"}, "rounded from the model's float16"),
        ({"dtype": "float64"}, {"dtype": "float32"}, "rounded from the model's float64"),
        ({"named": {"commit": ""}}, OWN, "which commit"),
        ({"named": {"tokenizer": ""}}, OWN, "became tokens"),
        ({"named": {"commit": "fake-2"}}, OWN, "not the model of this cache"),
        ({"named": {"quantization": "8bit"}}, OWN, "not the model of this cache"),
        ({"dtype": "bfloat16"}, {"dtype": "bfloat16"}, "not the model of this cache"),
    ],
)
def test_what_is_not_the_models_own_is_refused(engine: Any, asked: Any, says: str, bench: Bench) -> None:
    run = bench.harvest(PROMPTS, bench.engine(**engine), **asked)
    cache = bench.cache(**SAME)
    with pytest.raises(InvalidInput, match=says):
        cache.import_harvest(run)
    assert cache.store.sets() == []
    assert cache.store.recall(f"pulled:{MODEL}") is None


def test_a_run_that_does_not_tell_its_limits_is_refused(bench: Bench) -> None:
    run = bench.harvest(PROMPTS, **OWN)
    path = Path(run.place.url) / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["tokenizer_limits"]
    path.write_text(json.dumps(manifest))
    with pytest.raises(InvalidInput, match="became tokens"):
        bench.cache().import_harvest(run.place.url)


def test_a_cut_import_is_no_model_at_hand_and_goes_on(bench: Bench) -> None:
    run = bench.harvest(PROMPTS, shard_size=1, **OWN)
    kept = Path(shutil.copytree(run.place.url, bench.root / "kept"))
    (Path(run.place.url) / "shard_00003.safetensors").unlink()
    cache = bench.cache(MODEL, cache_pooled=False, **SAME)
    with pytest.raises(HarvestDamaged, match="shard_00003"):
        cache.import_harvest(run.place.url)
    assert cache.store.recall(f"pulled:{MODEL}") is None

    assert cache.import_harvest(kept) == len(PROMPTS)
    ids = [run.token_ids(i).tolist() for i in range(3)]
    assert same_rows(cache, bench.fill(PROMPTS, folder="other", cache_pooled=False, **SAME), ids)


def test_another_model_of_that_name_is_refused(bench: Bench) -> None:
    """A model that was loaded before is known, though it is not loaded now."""
    cache = bench.cache(MODEL)
    cache.import_harvest(bench.harvest(PROMPTS, **OWN))
    other = bench.harvest(PROMPTS, bench.engine(named={"model": "org/other"}), "other", **OWN)
    assert cache.provenance.model == MODEL
    with pytest.raises(InvalidInput, match=r"of org/other, commit fake-1, float32"):
        bench.cache("org/third", "third").import_harvest(other)
