"""What a dataset records of its model, and what that is worth on another machine and to another version."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streamtap.cache.parts import FOLDER
from streamtap.dataset.names import INDEX
from streamtap.engines.transformers import TransformersEngine
from streamtap.errors import DatasetDamaged, NotCached
from streamtap.workbench.dataset_rows import load_activations, load_rows

Bench = Any
MODEL = "org/fake"
COMMIT = "c0ffee" + "0" * 34
PROMPTS = ["The sky", "is blue at noon", "x"]


def change(where: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Write another capture into the manifest of a dataset."""
    table = pq.read_table(where / INDEX)
    metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    manifest = json.loads(metadata["streamtap:manifest"])
    edit(manifest["capture"])
    with pq.ParquetWriter(where / INDEX, table.schema) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata(metadata | {"streamtap:manifest": json.dumps(manifest)})


@pytest.fixture
def where(bench: Bench) -> Path:
    bench.fill(PROMPTS, bench.engine(named={"commit": COMMIT}))
    return Path(bench.push(PROMPTS))


EDITS: dict[str, Callable[[dict[str, Any]], None]] = {
    "values that are made otherwise now": lambda capture: capture["identity"].update(values=0),
    "a word more in the identity": lambda capture: capture["identity"].update(temperature=1),
    "a word more of the provenance": lambda capture: capture["provenance"].update(cluster="one"),
    "a word less of the provenance": lambda capture: capture["provenance"].pop("attention"),
    "no identity": lambda capture: capture.pop("identity"),
    "no limits": lambda capture: capture.pop("limits"),
    "nothing": lambda capture: capture.clear(),
}


@pytest.mark.parametrize("edit", EDITS)
def test_what_another_version_recorded_is_not_taken_for_ours(edit: str, where: Path, bench: Bench) -> None:
    change(where, EDITS[edit])
    wanted = load_activations(where, 2, PROMPTS)[2]
    assert load_rows(where, 2, PROMPTS).provenance.model == MODEL
    with pytest.warns(UserWarning, match="does not record its tokenizer"):
        bench.pull(where)

    engine = bench.engine(named={"commit": COMMIT})
    cache = bench.cache(engine, "pulled", layers=[2], compute_perplexity=False)
    assert np.array_equal(cache.activations(PROMPTS, 2), wanted)  # by their text alone
    assert engine.runs == []
    assert {info.identity["tokenizer"] for info in cache.store.sets()} == {""}


def forget_ids(where: Path, counts: list[int | None]) -> None:
    """Leave only the first tokens of each prompt in the index, or none at all."""
    table = pq.read_table(where / INDEX)
    number = table.schema.get_field_index("token_ids")
    lists = [None if n is None else ids[:n] for n, ids in zip(counts, table["token_ids"].to_pylist(), strict=True)]
    changed = table.set_column(number, "token_ids", pa.array(lists, table.schema.field(number).type))
    metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    with pq.ParquetWriter(where / INDEX, changed.schema) as writer:
        writer.write_table(changed)
        writer.add_key_value_metadata(metadata)


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("counts", [[None, None, None], [None, 99, 99], [99, 0, 99], [99, 99, 2]])
@pytest.mark.parametrize("options", [{}, {"cache_pooled": False}])
def test_prompts_whose_tokens_are_not_all_recorded_go_by_text(
    counts: list[int | None], options: dict[str, Any], bench: Bench
) -> None:
    prompts = ["The sky", "is blue at noon", "and red"]
    bench.fill(prompts, bench.engine(named={"commit": COMMIT}), **options)
    where = bench.push(prompts, shuffle=False)
    wanted = load_activations(where, 2, prompts)[2]
    forget_ids(where, counts)
    if options and 2 in counts:
        with pytest.raises(DatasetDamaged, match="do not fit its token rows"):
            bench.pull(where)
        return
    with pytest.warns(UserWarning, match="does not record its tokenizer"):
        bench.pull(where)

    cache = bench.cache(MODEL, "pulled", compute_perplexity=False, **options)
    assert np.array_equal(cache.activations(prompts, 2), wanted)
    assert len({row.tobytes() for row in wanted}) == 3


def test_a_commit_that_the_engine_did_not_know_is_none(bench: Bench) -> None:
    bench.fill(PROMPTS, bench.engine(named={"commit": "unknown"}))
    where = Path(bench.push(PROMPTS))
    with pytest.warns(UserWarning, match="does not record its commit, its tokenizer"):
        bench.pull(where)

    other = bench.engine(named={"model": "org/other", "commit": "unknown"})
    bench.fill(PROMPTS, other, "pulled", compute_perplexity=False)
    assert len(other.runs) == 3


def test_rows_of_a_quantised_model_stay_so_when_they_go_by_text(bench: Bench) -> None:
    bench.fill(PROMPTS, bench.engine(named={"commit": COMMIT, "quantization": "4bit"}))
    where = Path(bench.push(PROMPTS))
    change(where, lambda capture: capture.pop("identity"))
    with pytest.warns(UserWarning, match="does not record its tokenizer"):
        bench.pull(where)

    for quantization, n_run in ((None, 3), ("4bit", 0)):
        engine = bench.engine(named={"commit": COMMIT, "quantization": quantization})
        bench.cache(engine, "pulled", layers=[2], compute_perplexity=False).activations(PROMPTS, 2)
        assert len(engine.runs) == n_run


def test_rows_of_a_quantised_model_answer_only_who_asks_for_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    @wraps(TransformersEngine.load)
    def load(*_: Any, **__: Any) -> Any:
        raise OSError("offline")

    monkeypatch.setattr(TransformersEngine, "load", load)
    sources = {}
    for kind in ("4bit", "8bit", None):
        sources[kind] = bench.fill(PROMPTS, bench.engine(named={"quantization": kind}), str(kind))
        bench.pull(bench.push(PROMPTS, f"set-{kind}", str(kind)))
        if kind is not None:
            with pytest.raises(NotCached, match=f"of {MODEL} only rows of the quantised model were pulled .*'4bit'"):
                bench.cache(MODEL, "pulled").activations(PROMPTS, 1)
    for kind, source in sources.items():
        cache = bench.cache(MODEL, "pulled", quantization=kind)
        assert np.array_equal(cache.activations(PROMPTS, 1), source.activations(PROMPTS, 1))


@pytest.fixture
def loaded(bench: Bench, where: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The engine that loading gives: of another dtype than what was pulled."""
    bench.pull(where)
    engine = bench.engine(dtype="bfloat16", named={"commit": "decade" + "0" * 34})

    @wraps(TransformersEngine.load)
    def load(*_: Any, **__: Any) -> Any:
        return engine

    monkeypatch.setattr(TransformersEngine, "load", load)
    return engine


def damage(bench: Bench, channel: str) -> None:
    """Change a byte of a channel's first stored value in the cache of pulled rows."""
    store = bench.cache(MODEL, "pulled").store
    info = next(info for info in store.sets() if channel in [each.name for each in info.channels])
    needle = store.read_all(info.id, channel).values[0].tobytes()
    part = next(file for file in (store.root / FOLDER).glob("*.bin") if needle in file.read_bytes())
    content = bytearray(part.read_bytes())
    content[content.index(needle)] ^= 1
    part.write_bytes(bytes(content))


def test_rows_of_two_dtypes_are_not_mixed_once_the_model_is_loaded(loaded: Any, bench: Bench) -> None:
    prompts = [*PROMPTS, "a new one"]
    wanted = bench.fill(prompts, loaded, "own")
    cache = bench.cache(MODEL, "pulled")
    assert cache.activations(PROMPTS, 1).dtype == np.float32
    found = cache.activations(prompts, 1)

    assert found.dtype == "bfloat16"
    assert np.array_equal(found, wanted.activations(prompts, 1))
    assert np.array_equal(cache.get_perplexity(prompts), wanted.get_perplexity(prompts))


def test_nor_where_it_is_loaded_to_heal_one_layer(loaded: Any, bench: Bench) -> None:
    wanted = bench.fill(PROMPTS, loaded, "own")
    damage(bench, "layer_2")
    cache = bench.cache(MODEL, "pulled")
    acts, own = cache.rows(PROMPTS), wanted.rows(PROMPTS)

    assert {acts.acts[layer].dtype.name for layer in range(4)} == {"bfloat16"}
    assert all(np.array_equal(acts.acts[layer], own.acts[layer]) for layer in range(4))
    assert acts.provenance == own.provenance


def test_nor_where_it_is_loaded_to_heal_a_perplexity(loaded: Any, bench: Bench) -> None:
    wanted = bench.fill(PROMPTS, loaded, "own")
    damage(bench, "perplexity")

    assert np.array_equal(bench.cache(MODEL, "pulled").get_perplexity(PROMPTS), wanted.get_perplexity(PROMPTS))


@pytest.mark.parametrize(
    "edit",
    [
        lambda capture: capture["identity"].update(pooling="median"),
        lambda capture: capture["identity"].update(positions="nowhere"),
        lambda capture: capture["identity"].pop("exact"),
    ],
)
def test_an_identity_that_means_nothing_is_damage(edit: Callable[[Any], None], where: Path, bench: Bench) -> None:
    change(where, edit)
    with pytest.raises(DatasetDamaged, match="records of its rows' identity means nothing"):
        bench.pull(where)


def test_what_is_recorded_whole_needs_no_warning(where: Path, bench: Bench) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bench.pull(where)
    assert {info.identity["tokenizer"] for info in bench.cache(folder="pulled").store.sets()} == {"characters"}


def say_model(where: Path, name: str, revision: str | None) -> list[str]:
    """Write another model into the manifest of another library's dataset, and give the prompts."""
    table = pq.read_table(where / INDEX)
    metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    with pq.ParquetWriter(where / INDEX, table.schema) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata(metadata | {"lmprobe:model": json.dumps({"name": name, "revision": revision})})
    prompts: list[str] = table["text"].to_pylist()
    return prompts


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("revision", [None, "main"])
def test_models_without_a_commit_do_not_share_rows(revision: str | None, bench: Bench) -> None:
    """Of one width, dtype and pooling, and with the same texts."""
    wanted, prompts = {}, []
    for name in ("org/a", "org/b"):
        where = Path(shutil.copytree(bench.sample("v2-pooled-logits-ppl"), bench.root / name.replace("/", "-")))
        if name == "org/b":
            change_values(where)
        prompts = say_model(where, name, revision)
        with pytest.warns(UserWarning, match="does not record its commit"):
            bench.pull(where)
        wanted[name] = load_activations(where, 15, prompts)[15]

    assert not np.array_equal(wanted["org/a"], wanted["org/b"])
    perplexities = []
    for name, rows in wanted.items():
        cache = bench.cache(name, "pulled", layers=[15], cache_logits=True, logit_top_k=10)
        assert np.array_equal(cache.activations(prompts, 15), rows)
        perplexities.append(cache.get_perplexity(prompts))
    assert not np.array_equal(*perplexities, equal_nan=True)
    kinds = [str(info.identity["kind"]) for info in bench.cache("org/a", "pulled").store.sets()]
    assert sorted(kinds) == sorted(2 * ["rows", "logits", "perplexity", "token_nll"])


def change_values(where: Path) -> None:
    """Other first values of every shard of rows, and other perplexities."""
    for shard in (where / "tensors").glob("hidden*.safetensors"):
        content = bytearray(shard.read_bytes())
        start = 8 + int.from_bytes(content[:8], "little")
        content[start : start + 4] = np.float32(123.5).tobytes()
        shard.write_bytes(bytes(content))
    table = pq.read_table(where / INDEX)
    number = table.schema.get_field_index("perplexity_mean")
    other = pa.array(np.full(len(table), 7.0), table.schema.field(number).type)
    pq.write_table(table.set_column(number, "perplexity_mean", other), where / INDEX)


def test_a_commit_that_is_not_recorded_is_said_and_fits_any(bench: Bench) -> None:
    where = bench.sample("v2-pooled")
    name = "example/SmolLM2-135M-Instruct-dequant"
    prompts = say_model(where, name, None)
    with pytest.warns(UserWarning, match="does not record its commit, its tokenizer"):
        bench.pull(where)

    for commit in ("one", "another"):
        engine = bench.engine(n_layers=30, hidden=576, context_tokens=200, named={"model": name, "commit": commit})
        bench.fill(prompts, engine, "pulled", layers=[15], compute_perplexity=False)
        assert engine.runs == []


def test_the_model_that_is_loaded_for_more_is_of_the_pulled_commit(
    where: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not of what the Hub has by then."""
    bench.pull(where)
    asked: list[tuple[Any, Any]] = []

    @wraps(TransformersEngine.load)
    def load(model: str, *, reference: Any, revision: Any, **_: Any) -> Any:
        asked.append((reference.revision, revision))
        raise OSError("offline")

    monkeypatch.setattr(TransformersEngine, "load", load)
    with pytest.raises(NotCached, match="cannot be loaded .OSError."):
        bench.cache(MODEL, "pulled").activations(["a new one"], 1)
    assert asked == [(COMMIT, COMMIT)]


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("commit", [COMMIT, "d" * 40])
def test_the_config_of_the_model_on_this_machine_hides_nothing(
    commit: str, where: Path, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer alone brings it, long before the weights; of another commit it is another model."""
    hub = bench.root / "hub"
    snapshot = hub / "models--org--fake" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (hub / "models--org--fake" / "refs").mkdir()
    (hub / "models--org--fake" / "refs" / "main").write_text(commit)
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))
    bench.pull(where)

    cache = bench.cache(MODEL, "pulled", layers=[1])
    if commit == COMMIT:
        assert cache.warmup(PROMPTS).activations_extracted == 0
    else:
        with pytest.raises(ImportError):  # it goes for the model, which this test has not
            cache.warmup(PROMPTS)
    assert bench.cache(MODEL, "pulled", layers=[1], revision=COMMIT).warmup(PROMPTS).activations_extracted == 0
