"""The index: its footer in few bytes, its columns, and what damage does to it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from streamtap.dataset.described import to_metadata
from streamtap.dataset.folder import FolderSource, FolderTarget
from streamtap.dataset.index import IndexFile, read_footer, rewrite_index, write_index
from streamtap.dataset.manifest import Hidden, Manifest, Shard
from streamtap.dataset.names import INDEX
from streamtap.dataset.writer import publish
from streamtap.errors import DatasetDamaged, DatasetNotFound

Make = Callable[..., Any]
POOLED = Manifest("m", None, 3, Hidden((0,), 2, "float32", "mean", (Shard(3, 3),)), None)
FULL = Manifest("m", None, 3, Hidden((0,), 2, "float32", None, (Shard(3, 3), Shard(3, 4)), 1), None)


def folder_with(tmp_path: Path, columns: dict[str, pa.Array], manifest: Manifest = POOLED, **more: str) -> Path:
    folder = tmp_path / "set"
    (folder / INDEX).parent.mkdir(parents=True)
    write_index(folder / INDEX, [columns], to_metadata(manifest) | more)
    return folder


def index_of(folder: Path) -> IndexFile:
    return IndexFile(folder / INDEX, FolderSource(folder))


def index_with(tmp_path: Path, manifest: Manifest = POOLED, **columns: Any) -> IndexFile:
    return index_of(
        folder_with(
            tmp_path,
            {
                name: pa.array(values) if not isinstance(values, pa.Array) else values
                for name, values in columns.items()
            },
            manifest,
        )
    )


def test_the_footer_of_a_large_index_costs_little(make: Make, tmp_path: Path, remote: Make) -> None:
    texts = np.random.default_rng(0).integers(0, 2**62, (4000, 40))
    made = make(4000, metadata=[{"long": row.tolist()} for row in texts])
    publish(made.contents, FolderTarget(tmp_path / "set"))
    source = remote(tmp_path / "set")
    footer = read_footer(source)

    assert footer.size_bytes == (tmp_path / "set" / INDEX).stat().st_size > 1_000_000
    assert footer.n_rows == 4000
    assert footer.columns["long"].startswith("list<")
    assert list(footer.columns)[:5] == ["text", "label", "num_tokens", "shard_index", "row_offset"]
    assert source.fetched == []
    assert source.range_bytes == 1 << 16
    assert footer.manifest == index_of(tmp_path / "set").manifest


def test_a_footer_longer_than_the_first_read_is_read_on(make: Make, tmp_path: Path, remote: Make) -> None:
    publish(make(400, layers=range(4)).contents, FolderTarget(tmp_path / "set"), shard_max_bytes=16)
    source = remote(tmp_path / "set")
    footer = read_footer(source)

    assert len(footer.manifest.files) == 1600
    assert len(source.ranges) == 2
    # Nothing is asked for twice.
    assert source.ranges[1][2] == source.ranges[0][1]


@pytest.mark.parametrize(
    "read", [read_footer, lambda source: IndexFile(source.fetch(INDEX), source)], ids=["footer", "file"]
)
@pytest.mark.parametrize(
    "content",
    [b"", b"PAR1", b"PAR1PAR1", b"x" * 100, b"PAR1" + b"\xff" * 4 + b"PAR1", b"x" * 40 + b"\x10\x00\x00\x00PAR1"],
)
def test_what_is_no_parquet_file_is_one_sentence(content: bytes, read: Any, tmp_path: Path) -> None:
    (tmp_path / "index").mkdir()
    (tmp_path / INDEX).write_bytes(content)
    with pytest.raises(DatasetDamaged, match=f"^the (footer of the )?index of {tmp_path} is [^\n]*$"):
        read(FolderSource(tmp_path))


@pytest.mark.filterwarnings("ignore:.*format version")
@pytest.mark.parametrize(
    "read", [read_footer, lambda source: IndexFile(source.fetch(INDEX), source)], ids=["footer", "file"]
)
def test_a_footer_damaged_anywhere_is_never_another_error(read: Any, make: Make, tmp_path: Path) -> None:
    publish(make(3).contents, FolderTarget(tmp_path / "set"))
    path = tmp_path / "set" / INDEX
    whole = path.read_bytes()
    length = int.from_bytes(whole[-8:-4], "little")
    outcomes = set()
    for place in range(len(whole) - 8 - length, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        try:
            read(FolderSource(tmp_path / "set"))
            outcomes.add("read")
        except (DatasetDamaged, DatasetNotFound) as error:
            outcomes.add(type(error).__name__)

    assert "DatasetDamaged" in outcomes


def test_a_damaged_column_is_one_sentence(make: Make, tmp_path: Path) -> None:
    publish(make(2000).contents, FolderTarget(tmp_path / "set"))
    path = tmp_path / "set" / INDEX
    whole = path.read_bytes()
    # The first column's pages, with what unpacks them.
    path.write_bytes(whole[:40] + b"\x00" * 2000 + whole[2040:])
    with pytest.raises(DatasetDamaged, match=f"^column text of the index of {tmp_path / 'set'} is damaged"):
        index_of(tmp_path / "set").texts()


def test_metadata_of_other_programs_may_be_any_bytes(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {"text": pa.array(["a"])})
    table = pq.read_table(folder / INDEX)
    pq.write_table(table.replace_schema_metadata({**table.schema.metadata, b"\xff": b"\xff"}), folder / INDEX)

    assert read_footer(FolderSource(folder)).manifest.model == "m"
    assert index_of(folder).manifest.model == "m"


def test_metadata_that_is_no_text_is_one_sentence(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {"text": pa.array(["a"])})
    table = pq.read_table(folder / INDEX)
    pq.write_table(table.replace_schema_metadata({**table.schema.metadata, b"lmprobe:model": b"\xff"}), folder / INDEX)
    with pytest.raises(DatasetDamaged, match=f"^the metadata of {folder} is not text"):
        read_footer(FolderSource(folder))


LABELS: dict[str, tuple[Any, Any]] = {
    "ints": (pa.array([1, 0, 1], pa.int32()), np.array([1, 0, 1])),
    "long ints": (pa.array([2**40, 0, 1]), np.array([2**40, 0, 1])),
    "ints with a null": (pa.array([1, None, 0]), np.array([1, None, 0], object)),
    "strings": (pa.array(["a", "b", ""]), np.array(["a", "b", ""])),
    "large strings": (pa.array(["a", "b", ""], pa.large_string()), np.array(["a", "b", ""])),
    "strings with a null": (pa.array(["a", None, "b"]), np.array(["a", None, "b"], object)),
    "nulls": (pa.nulls(3, pa.int32()), None),
    "nulls of no type": (pa.nulls(3), None),
}


@pytest.mark.parametrize("name", list(LABELS))
def test_labels(name: str, tmp_path: Path) -> None:
    column, expected = LABELS[name]
    labels = index_with(tmp_path, label=column).labels()

    if expected is None:
        assert labels is None
    else:
        assert labels is not None
        assert (labels.dtype, labels.tolist()) == (expected.dtype, expected.tolist())


def test_without_a_label_column_there_are_no_labels(tmp_path: Path) -> None:
    assert index_with(tmp_path, text=["a"]).labels() is None


def test_places_of_1_2_are_those_of_the_rows_and_not_of_the_logits(tmp_path: Path) -> None:
    index = index_with(
        tmp_path, shard_index=[9] * 3, row_offset=[9] * 3, shard_index_hidden=[0] * 3, row_offset_hidden=[2, 1, 0]
    )

    assert (index.places().shards.tolist(), index.places().rows.tolist()) == ([0] * 3, [2, 1, 0])
    assert index.logit_places().rows.tolist() == [9] * 3


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"shard_index": [0]}, "lacks column row_offset"),
        ({"row_offset": [0]}, "lacks column shard_index"),
        ({"shard_index": [0, None], "row_offset": [0, 1]}, "column shard_index .* must hold an int in each row"),
        ({"shard_index": ["0"], "row_offset": [0]}, "column shard_index .* must hold an int in each row"),
        ({"shard_index": [0], "row_offset": [0.5]}, "column row_offset .* must hold an int in each row"),
    ],
    ids=["no rows", "no shards", "a null", "a string", "a float"],
)
def test_places_that_are_none_are_one_sentence(columns: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DatasetDamaged, match=message):
        index_with(tmp_path, **columns).places()


@pytest.mark.parametrize(
    ("shards", "rows", "message"),
    [
        (None, [[0]], "lacks column token_shard_ids"),
        ([[0]], None, "lacks column token_shard_offsets"),
        ([[0, 0]], [[0]], "do not fit each other"),
        ([[0, None]], [[0, 1]], "do not fit each other"),
        ([["0"]], [[0]], "do not fit each other"),
        ([0], [0], "must hold lists"),
    ],
    ids=["no shards", "no rows", "lengths", "a null", "a string", "no lists"],
)
def test_token_places_that_are_none_are_one_sentence(shards: Any, rows: Any, message: str, tmp_path: Path) -> None:
    columns = {"token_shard_ids": shards, "token_shard_offsets": rows, "text": ["a"]}
    index = index_with(tmp_path, FULL, **{name: values for name, values in columns.items() if values is not None})
    with pytest.raises(DatasetDamaged, match=message):
        index.token_places()


def test_lists_of_several_row_groups_with_nulls_are_one(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    lists = pa.array([[1, 2], None, [], [3], [4, 5, 6]], pa.list_(pa.int64()))
    pq.write_table(pa.table({"token_ids": lists}), path, row_group_size=2)
    values, offsets = IndexFile(path, FolderSource(tmp_path)).lists("token_ids")

    assert values.tolist() == [1, 2, 3, 4, 5, 6]
    assert offsets.tolist() == [0, 2, 2, 2, 3, 6]


def test_last_tokens_are_found_among_the_others_where_they_have_no_shards_of_their_own(tmp_path: Path) -> None:
    manifest = Manifest("m", None, 2, Hidden((0,), 2, "float32", None, (Shard(2, 5),)), None)
    index = index_with(
        tmp_path,
        manifest,
        shard_index=[0, 0],
        row_offset=[0, 3],
        token_shard_ids=[[0, 0, 0], [0, 0]],
        token_shard_offsets=[[0, 1, 2], [3, 4]],
    )

    assert index.places().rows.tolist() == [2, 4]


def test_an_index_is_rewritten_without_some_columns(tmp_path: Path) -> None:
    old, new = tmp_path / "old.parquet", tmp_path / "new.parquet"
    table = pa.table({"text": [f"p{i}" for i in range(5)], "gone": range(5), "nested": [{"a": [i]} for i in range(5)]})
    pq.write_table(table, old, row_group_size=2)
    rewrite_index(old, new, {"lmprobe:x": "1"}, without=frozenset({"gone", "never there"}))

    assert pq.read_table(new).to_pylist() == table.drop_columns("gone").to_pylist()
    assert pq.ParquetFile(new).num_row_groups == 3
    assert pq.read_schema(new).metadata == {b"lmprobe:x": b"1"}


def test_an_empty_index_is_rewritten(tmp_path: Path) -> None:
    old, new = tmp_path / "old.parquet", tmp_path / "new.parquet"
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), old)
    rewrite_index(old, new, {"lmprobe:x": "1"})

    assert pq.read_table(new).num_rows == 0
    assert pq.read_schema(new).metadata == {b"lmprobe:x": b"1"}
