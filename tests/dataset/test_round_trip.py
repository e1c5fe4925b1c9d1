"""What is published reads back equal, by us and by plain libraries."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from streamtap.dataset import packing
from streamtap.dataset.checked import CheckedFiles
from streamtap.dataset.contents import make_plan, packed_bytes
from streamtap.dataset.folder import FolderSource, FolderTarget
from streamtap.dataset.names import INDEX
from streamtap.dataset.reader import Dataset
from streamtap.dataset.writer import publish

Make = Callable[..., Any]
HIDDEN = dict(  # noqa: C408
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    layers=st.lists(st.integers(0, 1200), min_size=1, max_size=3, unique=True),
    width=st.integers(1, 5),
    rows_a_shard=st.integers(1, 6),
    block_bytes=st.sampled_from([1, 64, 1 << 20]),
    k=st.sampled_from([0, 2]),
    stream=st.booleans(),
    seed=st.integers(0, 1000),
)


def read(folder: Path) -> Dataset:
    return Dataset(FolderSource(folder), CheckedFiles(folder.parent / "checked"))


def same(left: Any, right: Any) -> bool:
    return bool(left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes())


def with_safetensors(folder: Path, layer: int) -> list[Any]:
    """Each shard of a layer as the safetensors library reads it."""
    shards = []
    while (file := folder / f"tensors/hidden_layer{layer:03d}_shard{len(shards):03d}.safetensors").exists():
        with safe_open(file, framework="pt") as opened:
            assert list(opened.keys()) == [f"hidden.layer_{layer}"]
            shards.append(opened.get_tensor(f"hidden.layer_{layer}").float().numpy())
    return shards


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(n_prompts=st.integers(1, 17), **HIDDEN)
def test_pooled_round_trip(
    tmp_path_factory: pytest.TempPathFactory,
    make: Make,
    check_files: Make,
    n_prompts: int,
    rows_a_shard: int,
    block_bytes: int,
    stream: bool,
    **how: Any,
) -> None:
    folder = tmp_path_factory.mktemp("pooled") / "set"
    made = make(n_prompts, labels=list(range(n_prompts)), **how)
    row_bytes = made.contents.hidden.width * made.contents.hidden.dtype.itemsize
    size = max(rows_a_shard * row_bytes, made.contents.logits.row_bytes if made.contents.logits else 0)
    _publish(made.contents, folder, size, block_bytes, stream)
    check_files(folder)
    dataset, table = read(folder), pq.read_table(folder / INDEX)

    assert table.column("text").to_pylist() == made.contents.columns.texts
    assert np.array_equal(dataset.index.labels(), np.arange(n_prompts))
    places = list(zip(table["shard_index"].to_pylist(), table["row_offset"].to_pylist(), strict=True))
    for layer, rows in made.rows.items():
        assert same(dataset.read_layer(layer, dataset.index.places()), rows)
        shards = with_safetensors(folder, layer)
        assert max(len(shard) for shard in shards) * row_bytes <= size
        assert np.array_equal(np.stack([shards[shard][row] for shard, row in places]), rows.astype(np.float32))
    if made.contents.logits:
        values, ids = dataset.read_logits(dataset.index.logit_places())
        assert same(values, made.logits[0])
        assert same(ids, made.logits[1])


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(counts=st.lists(st.integers(1, 7), min_size=1, max_size=9), **HIDDEN)
def test_full_sequence_round_trip(
    tmp_path_factory: pytest.TempPathFactory,
    make: Make,
    check_files: Make,
    counts: list[int],
    rows_a_shard: int,
    block_bytes: int,
    stream: bool,
    **how: Any,
) -> None:
    folder = tmp_path_factory.mktemp("full") / "set"
    made = make(counts=counts, **how)
    row_bytes = made.contents.hidden.width * made.contents.hidden.dtype.itemsize
    size = max(rows_a_shard * row_bytes, made.contents.logits.row_bytes if made.contents.logits else 0)
    _publish(made.contents, folder, size, block_bytes, stream)
    check_files(folder)
    dataset, table = read(folder), pq.read_table(folder / INDEX)
    tokens, offsets = dataset.index.token_places()

    assert np.array_equal(offsets, made.offsets)
    places = zip(
        np.concatenate(table["token_shard_ids"].to_pylist()),
        np.concatenate(table["token_shard_offsets"].to_pylist()),
        strict=True,
    )
    found = [(int(shard), int(row)) for shard, row in places]
    for layer, rows in made.rows.items():
        assert same(dataset.read_layer(layer, tokens), rows)
        assert same(dataset.read_layer(layer, dataset.index.places()), rows[made.offsets[1:] - 1])
        shards = with_safetensors(folder, layer)
        assert np.array_equal(np.stack([shards[shard][row] for shard, row in found]), rows.astype(np.float32))


def _publish(contents: Any, folder: Path, size: int, block_bytes: int, stream: bool) -> None:
    told: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "_BLOCK_BYTES", block_bytes)
        address = publish(contents, FolderTarget(folder), shard_max_bytes=size, stream=stream, advance=told.append)
    assert address == str(folder)
    assert sum(told) == packed_bytes(contents, make_plan(contents, size))


FLOATS, INTS = pa.list_(pa.float64()), pa.list_(pa.int64())
POOLED_COLUMNS = {
    "text": pa.string(),
    "label": pa.int32(),
    "num_tokens": pa.int32(),
    "shard_index": pa.int32(),
    "row_offset": pa.int32(),
    "shard_index_logits": pa.int32(),
    "row_offset_logits": pa.int32(),
    "checked": pa.bool_(),
    "perplexity_max": pa.float64(),
    "perplexity_mean": pa.float64(),
    "perplexity_min": pa.float64(),
    "pushed_index": pa.int64(),
    "row_id": pa.int64(),
    "token_ids": INTS,
    "token_perplexity": FLOATS,
    "zebra": pa.string(),
}


def columns_of(folder: Path) -> dict[str, pa.DataType]:
    schema = pq.read_schema(folder / INDEX)
    assert len(set(schema.names)) == len(schema.names)
    return dict(zip(schema.names, schema.types, strict=True))


def more_columns(n_prompts: int) -> dict[str, Any]:
    perplexity = np.arange(n_prompts * 3, dtype=np.float64).reshape(n_prompts, 3)
    perplexity[1] = np.nan
    return {
        "perplexity": perplexity,
        "token_ids": lambda start, stop: [np.array([place, 7], np.int32) for place in range(start, stop)],
        "token_perplexity": lambda start, stop: [
            None if place == 1 else np.array([place / 2], np.float32) for place in range(start, stop)
        ],
    }


def test_columns_have_the_order_and_types_of_the_format(make: Make, tmp_path: Path) -> None:
    metadata = [{"zebra": "z", "checked": True, "row_id": 2**40 + place} for place in range(5)]
    made = make(5, k=2, metadata=metadata, **more_columns(5))
    publish(made.contents, FolderTarget(tmp_path / "set"))
    table = pq.read_table(tmp_path / "set" / INDEX)

    found = columns_of(tmp_path / "set")
    assert found == POOLED_COLUMNS
    assert list(found) == list(POOLED_COLUMNS)
    assert table["label"].null_count == 5
    assert table["perplexity_mean"].to_pylist() == [0.0, None, 6.0, 9.0, 12.0]
    assert table["token_ids"].to_pylist() == [[place, 7] for place in range(5)]
    assert table["token_perplexity"].to_pylist() == [[0.0], None, [1.0], [1.5], [2.0]]
    assert table["row_id"].to_pylist() == [each["row_id"] for each in metadata]


def test_full_sequence_columns_have_the_order_and_types_of_the_format(make: Make, tmp_path: Path) -> None:
    publish(make(counts=[3, 1, 2], metadata=[{"zebra": 1}] * 3).contents, FolderTarget(tmp_path / "set"))
    expected = {name: POOLED_COLUMNS[name] for name in list(POOLED_COLUMNS)[:5]} | {"token_offset": pa.int64()}
    expected |= {"pushed_index": pa.int64(), "token_shard_ids": INTS, "token_shard_offsets": INTS, "zebra": pa.int64()}

    found = columns_of(tmp_path / "set")
    assert found == expected
    assert list(found) == list(expected)
    table = pq.read_table(tmp_path / "set" / INDEX)
    assert table["token_offset"].to_pylist() == table["row_offset"].to_pylist()
    assert table["num_tokens"].to_pylist() == [3, 1, 2]


def test_logits_alone_are_a_dataset(make: Make, tmp_path: Path) -> None:
    made = make(7, layers=(), k=3)
    publish(made.contents, FolderTarget(tmp_path / "set"), shard_max_bytes=3 * 8 * 3)
    dataset = read(tmp_path / "set")

    assert [path.name for path in sorted((tmp_path / "set" / "tensors").iterdir())] == [
        f"logits_topk_{shard:03d}.safetensors" for shard in range(3)
    ]
    assert same(dataset.read_logits(dataset.index.logit_places())[1], made.logits[1])
    assert columns_of(tmp_path / "set")["shard_index"] == pa.int32()


def test_metadata_of_every_kind_reads_back(make: Make, tmp_path: Path) -> None:
    values: dict[str, list[Any]] = {
        "when": [datetime(2026, 1, 2, 3, tzinfo=UTC), None, datetime(2026, 1, 2, 4, tzinfo=UTC)],
        "day": [date(2026, 1, 2)] * 3,
        "tags": [["a"], [], None],
        "nested": [{"a": 1, "b": [1.5]}, {"a": None, "b": []}, None],
        "nothing": [None] * 3,
        "empty": [[], [], []],
        "unicode": ["é", "漢", "\U0001f600"],
    }
    rows = [{key: column[place] for key, column in values.items()} for place in range(3)]
    publish(make(3, metadata=rows).contents, FolderTarget(tmp_path / "set"))
    table = pq.read_table(tmp_path / "set" / INDEX)

    assert {key: table[key].to_pylist() for key in values} == values
    assert table.schema.field("nothing").type == pa.string()


def test_packing_twice_gives_the_same_bytes(make: Make, tmp_path: Path) -> None:
    for name in ("one", "other"):
        publish(make(counts=[3, 1, 4], k=2).contents, FolderTarget(tmp_path / name), shard_max_bytes=64)
    one, other = (
        {file.name: file.read_bytes() for file in (tmp_path / name / "tensors").iterdir()} for name in ("one", "other")
    )

    assert len(one) > 4
    assert one == other
