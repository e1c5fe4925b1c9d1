"""A harvest as a dataset: loaded, and pulled to where no model is."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from streamtap.engines.transformers import TransformersEngine
from streamtap.errors import DatasetExists, HarvestDamaged, InvalidInput, InvalidLayers, NotCached
from streamtap.harvest.asked import HarvestAsk
from streamtap.harvest.plan import Segments, Tokenised
from streamtap.harvest.run import run_harvest
from streamtap.harvested.folder_place import FolderPlace
from streamtap.harvested.joined import JoinedRuns
from streamtap.harvested.reader import HarvestedRun
from streamtap.spec import Projection
from streamtap.testing.models import tiny_model
from streamtap.testing.tokenizers import tiny_tokenizer
from streamtap.workbench.dataset_rows import load_activations, load_rows
from streamtap.workbench.from_harvest import dataset_from_harvest
from streamtap.workbench.harvest_texts import open_tokenizer
from streamtap.workbench.harvested_rows import HarvestedRows
from streamtap.workbench.upgrade import verify_dataset

Bench = Any
MODEL = "org/fake"
CHAT = [{"role": "user", "content": "Why is the sky blue?"}]
LONG = "a" * 70
PROMPTS = ["The sky", "is blue at noon", "x", CHAT, "and red", "is blue at noon", LONG]
OWN = {"dtype": "float32"}
INDEX = "index/train-00000-of-00001.parquet"
SAME: dict[str, Any] = {"truncate": "right", "compute_perplexity": False, "cache_pooled": False}


def publish(bench: Bench, run: Any, where: str = "set", engine: Any = None, **options: Any) -> Path:
    by = {} if "model" in options else {"tokenizer": (engine or bench.engine()).tokenizer}
    dataset_from_harvest(run, bench.root / where, **by, progress=False, **options)
    return bench.root / where


def index_of(folder: Path) -> dict[str, list[Any]]:
    return pq.read_table(folder / INDEX).to_pydict()


@pytest.fixture(autouse=True)
def nothing_is_said() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("pooling", ["none", "mean", "last_token"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_it_holds_the_rows_of_the_harvest(compression: Any, pooling: Any, shuffle: bool, bench: Bench) -> None:
    run = bench.harvest(PROMPTS, shard_size=3, layers=[1, 3], pooling=pooling, compression=compression, **OWN)
    where = publish(bench, run, labels=[0, 1, 0, 1, 0, 1, 0], shuffle=shuffle, shard_max_bytes=2000)
    row = {} if pooling == "mean" else {"pooling": "last_token"}
    acts, labels = load_activations(where, layers=[1, 3], return_labels=True, **row)

    assert verify_dataset(where).sound
    order = index_of(where)["pushed_index"]
    assert sorted(order) == list(range(len(PROMPTS)))
    assert (order != sorted(order)) == shuffle
    for layer in (1, 3):
        mine = np.stack([run.prompt(i, layer)[layer][-1] for i in order])
        assert np.array_equal(acts[layer], mine)
    assert labels.tolist() == [place % 2 for place in order]


def test_every_row_and_token_is_there(bench: Bench) -> None:
    run = bench.harvest(PROMPTS, layers=[2], **OWN)
    found = load_rows(publish(bench, run), layers=[2])
    mine = run.activations(layers=[2])

    assert np.array_equal(found.acts[2], mine.acts[2])
    for name in ("offsets", "token_ids", "positions"):
        assert np.array_equal(getattr(found, name), getattr(mine, name))


def test_texts_are_read_off_the_tokens(bench: Bench) -> None:
    """A text stands for its prompt where it gives the same tokens; a chat's, with no BOS of its own, does not."""
    where = publish(bench, bench.harvest(PROMPTS, **OWN))
    index = index_of(where)

    assert index["text"][:3] == ["The sky", "is blue at noon", "x"]
    assert index["text"][3].startswith("[user] Why is the sky blue?")
    assert index["text"][6] == "a" * 63
    assert index["tokenized_as"] == [0, 0, 0, 32, 0, 0, 0]
    assert index["token_ids"][3] == HarvestedRun.open(bench.root / "run").token_ids(3).tolist()


def test_prompts_that_are_given_keep_their_texts(bench: Bench) -> None:
    metadata = [{"n": i} for i in range(len(PROMPTS))]
    where = publish(bench, bench.harvest(PROMPTS, **OWN), prompts=PROMPTS, metadata=metadata)
    index = index_of(where)

    assert index["text"] == [*PROMPTS[:3], json.dumps(CHAT), *PROMPTS[4:]]
    assert index["tokenized_as"] == [0, 0, 0, 16, 0, 0, 1]
    assert index["n"] == list(range(len(PROMPTS)))


@pytest.mark.usefixtures("no_model")
@pytest.mark.parametrize("given", [True, False])
def test_a_cache_that_pulls_it_needs_no_model(given: bool, bench: Bench) -> None:
    run = bench.harvest(PROMPTS, **OWN)
    where = publish(bench, run, prompts=PROMPTS if given else None)
    plain = bench.fill(PROMPTS, **SAME)

    bench.pull(where)
    cache = bench.cache(MODEL, "pulled", **SAME)
    known = PROMPTS if given else [*PROMPTS[:3], *PROMPTS[4:6]]
    assert cache.warmup(known).activations_extracted == 0
    ids = [run.token_ids(i).tolist() for i in range(len(run))]
    for asked in (known, ids):
        mine, theirs = cache.rows(asked), plain.rows(asked)
        assert all(np.array_equal(mine.acts[layer], theirs.acts[layer]) for layer in theirs.layers)
        assert np.array_equal(mine.token_ids, theirs.token_ids)


def test_a_text_of_tokens_is_no_prompt(bench: Bench) -> None:
    """Without BOS these tokens are no text's, so that the text has to find no rows of them."""
    run = bench.harvest(["The sky", "is blue"], add_special_tokens=False, **OWN)
    for where, options in (("read", {}), ("given", {"prompts": ["The sky", "is blue"]})):
        index = index_of(publish(bench, run, where, **options))
        assert index["tokenized_as"] == [32, 32]
        bench.pull(where, f"cache-{where}")
        cache = bench.cache(bench.engine(), f"cache-{where}", **SAME)
        assert cache.warmup(["The sky"]).activations_extracted == 1
        assert cache.warmup([run.token_ids(0).tolist()]).activations_extracted == 0


def test_rounded_rows_are_said_to_be_others(bench: Bench) -> None:
    """Of a float32 model the harvest kept bfloat16, which a cache of the model must not take for its own."""
    run = bench.harvest(PROMPTS[:3])
    where = publish(bench, run)
    assert load_activations(where, layers=1, pooling="last_token")[1].shape == (3, 8)
    with pytest.warns(UserWarning, match="does not record"):
        bench.pull(where)
    cache = bench.cache(bench.engine(), "pulled", **SAME)
    assert cache.warmup(PROMPTS[:3]).activations_extracted == 3
    cache = bench.cache(MODEL, "pulled", **SAME)
    assert cache.rows(PROMPTS[:3]).acts[1].dtype.name == "bfloat16"

    # And by text a prompt is found only where the text was its own.
    other = publish(bench, bench.harvest(PROMPTS[:3], where="bare", add_special_tokens=False), "other")
    with pytest.warns(UserWarning, match="does not record"):
        bench.pull(other, "bare-cache")
    with pytest.raises(NotCached):
        bench.cache(MODEL, "bare-cache", **SAME).rows(PROMPTS[:1])


def test_wider_files_become_the_models_own_rows_again(bench: Bench) -> None:
    engine = bench.engine(dtype="bfloat16")
    where = publish(bench, bench.harvest(PROMPTS, engine, dtype="float32"))
    bench.pull(where)
    cache = bench.cache(bench.engine(dtype="bfloat16"), "pulled", **SAME)
    assert cache.warmup(PROMPTS[:3]).activations_extracted == 0
    assert cache.rows(PROMPTS[:1]).acts[1].dtype.name == "bfloat16"


def test_a_model_without_a_commit_is_said_to_be_unknown(bench: Bench) -> None:
    run = bench.harvest(PROMPTS[:3], bench.engine(named={"commit": ""}), **OWN)
    where = publish(bench, run)
    with pytest.warns(UserWarning, match="its commit"):
        bench.pull(where)


def test_windows_keep_their_documents(bench: Bench) -> None:
    engine = bench.engine()
    ids = engine.tokenizer.read("The sky is blue", 0)
    segments = Segments(np.array([4, 5]), np.array([7, 0]), np.array([0, 9], np.int32))
    windows = [Tokenised(ids, segments=segments), Tokenised(ids[:4])]
    folder = bench.root / "run"
    run_harvest(engine, windows, FolderPlace(folder), HarvestAsk(dtype="float32"), spool=bench.root / "spool")
    for where, metadata in (("a", None), ("b", [{"n": 1}, {"n": 2}])):
        index = index_of(publish(bench, folder, where, metadata=metadata))
        assert index["documents"] == [[4, 5], None]
        assert (index["offsets"][0], index["starts"][0]) == ([7, 0], [0, 9])
    assert index["n"] == [1, 2]
    with pytest.raises(InvalidInput, match="metadata must be one dict a prompt"):
        publish(bench, folder, "c", metadata=[{}])


def test_several_jobs_are_one_dataset(bench: Bench) -> None:
    parts = [bench.harvest(some, where=str(i), **OWN) for i, some in enumerate((PROMPTS[:3], PROMPTS[3:]))]
    joined, whole = publish(bench, JoinedRuns(parts), "joined"), publish(bench, bench.harvest(PROMPTS, **OWN), "whole")
    assert index_of(joined) == index_of(whole)
    assert np.array_equal(load_rows(joined, layers=[1]).acts[1], load_rows(whole, layers=[1]).acts[1])


def test_the_same_again_changes_nothing(bench: Bench, files_of: Any) -> None:
    run = bench.harvest(PROMPTS, **OWN)
    where = publish(bench, run, labels=list("abcdefg"))
    before = files_of(where)
    publish(bench, run, labels=list("abcdefg"))
    assert files_of(where) == before

    with pytest.raises(DatasetExists):
        publish(bench, run, labels=list("abcdefx"))
    publish(bench, run, layers=[1], exist_ok=True)
    assert set(load_activations(where, pooling="last_token")) == {1}


@pytest.mark.parametrize(
    ("asked", "options", "says"),
    [
        ({"projection": Projection.onto(np.eye(2, 8))}, {}, "products"),
        ({"positions": "last"}, {}, "no place in the format"),
        ({}, {"prompts": PROMPTS[:2]}, "of 3 prompts, and 2 were given"),
        ({}, {"prompts": ["The sky", "is BLUE at noon", "x"]}, "prompt 1 is not the one"),
        ({}, {"prompts": [[1, 2], [3], [4]]}, "token ids"),
        ({}, {"labels": [1]}, "labels must be one a prompt"),
    ],
)
def test_what_has_no_place_is_refused(asked: Any, options: Any, says: str, bench: Bench) -> None:
    run = bench.harvest(PROMPTS[:3], **{**OWN, **asked} if "projection" not in asked else asked)
    with pytest.raises(InvalidInput, match=says):
        publish(bench, run, **options)
    assert not (bench.root / "set").exists()
    if not asked:
        with pytest.raises(InvalidLayers):
            publish(bench, run, layers=[17])


def test_positions_with_a_pooling_have_a_place(bench: Bench) -> None:
    run = bench.harvest(PROMPTS, positions="-2:", pooling="mean", **OWN)
    bench.pull(publish(bench, run, prompts=PROMPTS))
    cache = bench.cache(bench.engine(), "pulled", **{**SAME, "cache_pooled": True}, positions="-2:", pooling="mean")
    assert cache.warmup(PROMPTS).activations_extracted == 0


def test_the_tokenizer_is_that_of_the_model(bench: Bench) -> None:
    folder = bench.root / "model"
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    run = bench.harvest(["The sky", "is blue"], TransformersEngine.load(str(folder)), **OWN)
    index = index_of(publish(bench, run, model=folder))
    assert index["text"] == ["The sky", "is blue"]
    assert "tokenized_as" not in index

    moved = folder.rename(bench.root / "moved")
    with pytest.raises(InvalidInput, match=str(folder)):
        open_tokenizer(HarvestedRows(run))
    assert open_tokenizer(HarvestedRows(run), moved).context_length is not None
    (moved / "tokenizer_config.json").write_text("{}")
    with pytest.raises(InvalidInput, match="not the one that"):
        open_tokenizer(HarvestedRows(run), moved)


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_bytes_that_changed_are_not_published(compression: Any, bench: Bench) -> None:
    run = bench.harvest(PROMPTS, compression=compression, **OWN)
    file = next(Path(run.place.url).glob("shard_00000*"))
    data = bytearray(file.read_bytes())
    data[-20] ^= 1
    file.write_bytes(bytes(data))

    with pytest.raises(HarvestDamaged, match="shard_00000"):
        publish(bench, HarvestedRun.open(run.place.url))
    with pytest.raises(HarvestDamaged, match="shard_00000"):
        bench.cache(**SAME).import_harvest(run.place.url)
    assert not (bench.root / "set" / INDEX).exists()
