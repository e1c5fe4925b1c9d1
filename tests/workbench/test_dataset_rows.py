from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from numpy.typing import NDArray

from streamtap.dataset.names import INDEX
from streamtap.errors import DatasetNotFound, InvalidInput, InvalidLayers, NotInDataset, PoolingMismatch
from streamtap.pooling import pool
from streamtap.workbench import dataset_rows
from streamtap.workbench.dataset_rows import load_activations, load_rows
from streamtap.workbench.open_dataset import fetch_dataset_metadata

Bench = Any
PROMPTS = ["The sky", "is blue at noon", "x", "and red", "in the evening", "so", "as a rule it is"]
CHAT = [{"role": "user", "content": "Why?"}]
# Version 1 says how to upgrade it, which is tested where that is done.
pytestmark = pytest.mark.filterwarnings("ignore:.*older format version")
SAMPLES = [
    *("v1-0-colocated", "v1-2-pooled-logits", "v2-extraction-bf16", "v2-full-sequence", "v2-pooled"),
    *("v2-pooled-logits-ppl", "v2-pooled-mean", "v2-pooled-multishard", "v2-string-labels"),
    *("v2-unlabelled-duplicates", "v2-upgraded-from-v1-2"),
]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory, new_bench: Any) -> Any:
    """A pooled dataset in the given order, a full-sequence one in random order, and their caches."""
    bench = new_bench(tmp_path_factory.mktemp("published"))
    bench.pooled = bench.fill(PROMPTS, folder="pooled")
    bench.full = bench.fill(PROMPTS, bench.engine(dtype="bfloat16"), "full", cache_pooled=False)
    bench.push(PROMPTS, "pooled-set", "pooled", shuffle=False, shard_max_bytes=64)
    bench.push(PROMPTS, "full-set", "full", shard_max_bytes=200)
    return bench


def same(left: NDArray[Any], right: NDArray[Any]) -> bool:
    return left.dtype == right.dtype and np.array_equal(left, right)


@pytest.mark.parametrize("sample", SAMPLES)
def test_what_another_library_wrote_is_read_to_the_value(sample: str, bench: Bench, expected: dict[str, Any]) -> None:
    wanted = {key.removeprefix(f"{sample}/"): each for key, each in expected.items() if key.startswith(f"{sample}/")}
    where = bench.sample(sample)
    acts, labels = load_activations(where, return_labels=True)

    assert [f"layer_{layer}" for layer in acts] == sorted((k for k in wanted if k.startswith("layer_")), key=_number)
    assert all(same(acts[layer], wanted[f"layer_{layer}"]) for layer in acts)
    if "labels" in wanted:
        assert labels.tolist() == wanted["labels"].tolist()
    # Where that library gives none the column is all null, or it has one null, or the library was too old to.
    column = pq.read_table(where / INDEX)["label"].to_pylist()
    assert labels is None if sample == "v2-unlabelled-duplicates" else labels.tolist() == column
    if "tokens/lengths" in wanted:
        rows = load_rows(where)
        assert np.diff(rows.offsets).tolist() == wanted["tokens/lengths"].tolist()
        assert all(np.array_equal(rows.acts[k].astype("f4"), wanted[f"tokens/layer_{k}"]) for k in rows.acts)


def _number(name: str) -> int:
    return int(name.rpartition("_")[2])


def test_rows_come_in_the_order_of_the_dataset_or_of_the_prompts(published: Any) -> None:
    where, cache = published.root / "pooled-set", published.pooled
    asked = [PROMPTS[i] for i in (4, 0, 6, 0, 2)]

    assert same(load_activations(where, 3)[3], cache.activations(PROMPTS, 3))
    assert same(load_activations(where, 3, asked)[3], cache.activations(asked, 3))
    assert load_activations(where, 3, [])[3].shape == (0, 8)
    order = fetch_dataset_metadata(published.root / "full-set").prompts
    assert order != PROMPTS
    found = load_activations(published.root / "full-set", 3, dtype=None)[3]
    assert same(found, published.full.activations(order, 3))


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_nth_repetition_takes_the_nth_row_that_was_pushed(shuffle: bool, bench: Bench) -> None:
    prompts = ["many", "one", "many", "x", "many"]
    bench.fill(prompts)
    where = bench.push(prompts, labels=[10, 11, 12, 13, 14], shuffle=shuffle)

    def labels(asked: list[str]) -> list[int]:
        found: list[int] = load_activations(where, 0, asked, return_labels=True)[1].tolist()
        return found

    assert labels(["many", "many", "one", "many"]) == [10, 12, 11, 14]
    assert labels(["one", "many", "one", "one", "many"]) == [11, 10, 11, 11, 12]
    with pytest.raises(NotInDataset, match=r"1 of 4 prompts have no row in .*: prompts 3\..*as many rows there"):
        labels(["many"] * 4)


def test_prompts_that_are_absent_are_counted_and_named(published: Any) -> None:
    absent = ["never", PROMPTS[1], "nor this", *(f"absent {i}" for i in range(9)), CHAT]
    with pytest.raises(NotInDataset) as raised:
        load_activations(published.root / "pooled-set", 0, absent)

    assert "12 of 13 prompts have no row" in str(raised.value)
    assert "prompts 0, 2, 3, 4, 5, 6, 7, 8, …" in str(raised.value)
    assert "never" not in str(raised.value)


@pytest.mark.parametrize(
    ("layers", "found"),
    [
        (None, [0, 1, 2, 3]),
        ("all", [0, 1, 2, 3]),
        (2, [2]),
        (np.int64(2), [2]),
        ([3, 1], [1, 3]),
        (np.array([3, 1]), [1, 3]),
        (range(1, 3), [1, 2]),
        (-1, [3]),
        ([-1, 0], [0, 3]),
        ("middle", [2]),
        ("last", [3]),
        ("1-2", [1, 2]),
        ("0,2-3", [0, 2, 3]),
        (":2", [0, 1]),
    ],
)
def test_layers_are_named_in_every_way(layers: Any, found: list[int], published: Any) -> None:
    assert list(load_activations(published.root / "pooled-set", layers)) == found


@pytest.mark.parametrize(
    ("layers", "found"),
    [
        (None, [0, 15, 29]),
        ("all", [0, 15, 29]),
        (15, [15]),
        ([29, 0], [0, 29]),
        (np.array([29, 0]), [0, 29]),
        ("15", [15]),
        ("0, 29", [0, 29]),
    ],
)
def test_layers_by_number_need_no_depth(layers: Any, found: list[int], bench: Bench) -> None:
    assert list(load_activations(bench.sample("v2-pooled"), layers)) == found


@pytest.mark.parametrize("layers", [-1, [0, -1], "last", "middle", "15:", "-3"])
def test_layers_that_need_a_depth_which_is_not_recorded_are_refused(layers: Any, bench: Bench) -> None:
    with pytest.raises(InvalidLayers, match=r"needs the model's depth, which .* does not record.*holds \[0, 15, 29\]"):
        load_activations(bench.sample("v2-pooled"), layers)


@pytest.mark.parametrize(
    ("layers", "kind", "message"),
    [
        (16, NotInDataset, r"holds layers \[0, 15, 29\]; it has no layer 16"),
        ([0, 16, 17], NotInDataset, "it has no layer 16, 17"),
        ("14-16", NotInDataset, "it has no layer 14, 16"),
        ([], InvalidLayers, "no layers were asked for"),
        ("deep", InvalidLayers, "is not understood"),
        ([1.5], InvalidLayers, "whole numbers"),
        (True, InvalidLayers, "layers must be"),
    ],
)
def test_layers_that_are_not_there_are_refused(layers: Any, kind: type[Exception], message: str, bench: Bench) -> None:
    with pytest.raises(kind, match=message):
        load_activations(bench.sample("v2-pooled"), layers)


def test_another_pooling_than_the_stored_one_is_refused(published: Any) -> None:
    where = published.root / "pooled-set"
    with pytest.raises(PoolingMismatch, match="'mean' was asked for, and .* stores 'last_token' alone"):
        load_activations(where, pooling="mean")
    with pytest.raises(InvalidInput, match="pooling must be one of"):
        load_activations(where, pooling="median")
    with pytest.raises(InvalidInput, match="load_rows gives every row"):
        load_activations(where, pooling="none")
    assert same(load_activations(where, 1, pooling="last_token")[1], load_activations(where, 1)[1])


@pytest.mark.parametrize("pooling", ["last_token", "first_token", "mean", "max"])
@pytest.mark.parametrize("block_bytes", [1, 1000, 1 << 26])
def test_every_pooling_is_made_of_a_full_sequence(
    pooling: str, block_bytes: int, published: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset_rows, "_BLOCK_BYTES", block_bytes)
    where, asked = published.root / "full-set", [*PROMPTS[2:], PROMPTS[3]]
    raw = published.full.rows(asked)
    stored = load_activations(where, prompts=asked, pooling=pooling, dtype=None)
    wide = load_activations(where, 2, asked, pooling=pooling)[2]

    assert all(same(stored[layer], pool(raw.acts[layer], raw.offsets, pooling)) for layer in range(4))
    assert same(wide, pool(raw.acts[2].astype(np.float32), raw.offsets, pooling))
    everything = load_activations(where, 2, pooling=pooling)[2]
    order = fetch_dataset_metadata(where).prompts
    assert same(everything[[order.index(text) for text in asked]], wide)


@pytest.mark.parametrize(
    ("asked", "kind"),
    [
        (None, ml_dtypes.bfloat16),
        (np.float32, np.float32),
        ("float64", np.float64),
        (torch.float16, np.float16),
        (np.dtype("f8"), np.float64),
    ],
)
def test_arrays_are_of_the_dtype_asked_for(asked: Any, kind: Any, published: Any) -> None:
    found = load_activations(published.root / "full-set", 1, dtype=asked)[1]

    assert same(found, load_activations(published.root / "full-set", 1, dtype=None)[1].astype(kind))
    with pytest.raises(InvalidInput, match="dtype must be 'float32'"):
        load_activations(published.root / "full-set", 1, dtype="wide")


def test_one_array_instead_of_a_dict(published: Any) -> None:
    where = published.root / "pooled-set"
    acts = load_activations(where, [1, 3])
    whole = load_activations(where, [1, 3], as_dict=False)

    assert whole.shape == (7, 2, 8)
    assert same(whole[:, 0], acts[1])
    assert same(whole[:, 1], acts[3])


LABELS: dict[str, tuple[list[Any] | None, Any]] = {
    "ints": ([3, 1, 2, 0, 5, 4, -1], np.int64),
    "large": ([1 << 40, 1, 2, 3, 4, 5, 6], np.int64),
    "bools": ([True, False, True, True, False, True, False], np.int64),
    "numpy": (list(np.arange(7, dtype=np.int16)), np.int64),
    "strings": (["no", "yes", "", "perhaps", "é", "no", "yes"], np.str_),
    "some ints": ([0, None, 2, None, 4, 5, 6], np.object_),
    "some strings": (["a", None, "b", None, "c", "d", "e"], np.object_),
    "none given": (None, None),
    "all null": ([None] * 7, None),
}


@pytest.mark.parametrize("kind", LABELS)
def test_labels_of_every_kind_come_back(kind: str, bench: Bench) -> None:
    given, dtype = LABELS[kind]
    bench.fill(PROMPTS, layers=[0])
    where = bench.push(PROMPTS, labels=given)
    _, labels = load_activations(where, prompts=PROMPTS, return_labels=True)
    if dtype is None:
        assert labels is None
        assert load_activations(where, return_labels=True)[1] is None
        return
    assert np.issubdtype(labels.dtype, dtype)
    assert labels.tolist() == list(given or [])
    order = fetch_dataset_metadata(where).prompts
    assert load_activations(where, return_labels=True)[1].tolist() == [(given or [])[PROMPTS.index(t)] for t in order]


def test_labels_of_some_prompts_are_as_if_there_were_no_others(bench: Bench) -> None:
    bench.fill(PROMPTS, layers=[0])
    for name, given in (("ints", LABELS["some ints"][0]), ("strings", LABELS["some strings"][0])):
        where = bench.push(PROMPTS, name, labels=given)

        def labels(*places: int, where: Path = where) -> Any:
            return load_activations(where, 0, [PROMPTS[i] for i in places], return_labels=True)[1]

        assert given is not None
        assert labels(0, 1, 2).tolist() == given[:3]
        assert labels(0, 1, 2).dtype == object
        assert labels(4, 2).tolist() == [given[4], given[2]]
        assert labels(4, 2).dtype.kind == ("i" if name == "ints" else "U")
        assert labels(1, 3) is None


@pytest.mark.parametrize(
    "options",
    [
        {"cache_pooled": False},
        {"pooling": "last_token"},
        {"pooling": "first_token"},
        {"pooling": "mean"},
        {"pooling": "last_token", "positions": ":-1"},
        {"pooling": "first_token", "positions": "-2:"},
        {"pooling": "first_token", "exclude_special_tokens": True},
    ],
)
def test_load_rows_gives_what_the_cache_gives(options: dict[str, Any], bench: Bench) -> None:
    cache = bench.fill(PROMPTS, **options)
    where = bench.push(PROMPTS)
    asked = [PROMPTS[4], *PROMPTS]
    found, wanted = load_rows(where, [1, 2], asked), cache.rows(asked, [1, 2])

    assert found.layers == (1, 2)
    assert all(same(found.acts[layer], wanted.acts[layer]) for layer in found.layers)
    for name in ("offsets", "token_ids", "positions", "index"):
        assert same(getattr(found, name), getattr(wanted, name)), name
    assert (found.provenance, found.pooling) == (wanted.provenance, wanted.pooling)


def test_rows_of_which_the_tokens_are_not_recorded_say_so(bench: Bench) -> None:
    pooled, full = load_rows(bench.sample("v2-pooled-logits-ppl"), 15), load_rows(bench.sample("v2-full-sequence"), 15)

    assert set(pooled.token_ids) == set(pooled.positions) == set(full.token_ids) == {-1}
    assert np.array_equal(full.positions, np.concatenate([np.arange(n) for n in np.diff(full.offsets)]))
    about = pooled.provenance
    assert (about.model, about.commit[:4]) == ("example/SmolLM2-135M-Instruct-dequant", "0123")
    assert (about.dtype, about.n_layers, about.hidden, about.tokenizer) == ("float32", 30, 576, "")


def test_a_dataset_of_logits_alone_holds_no_activations(bench: Bench) -> None:
    bench.fill(PROMPTS, cache_logits=True, logit_top_k=3)
    where = bench.push(PROMPTS, tensors=["logits_topk"])
    with pytest.raises(NotInDataset, match="holds no activations"):
        load_activations(where)


def test_no_dataset_there(tmp_path: Path) -> None:
    with pytest.raises(DatasetNotFound, match="no such folder"):
        load_activations(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DatasetNotFound, match="holds no file index"):
        load_activations(tmp_path / "empty")


def test_nothing_is_said_of_a_dataset_of_ours(published: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_activations(published.root / "pooled-set", return_labels=True)
        load_rows(published.root / "full-set")
