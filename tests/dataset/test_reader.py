"""Rows out of a dataset: whole files or a few bytes, each checked, and damage told in one sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamtap.dataset import checked, reader
from streamtap.dataset.checked import CheckedFiles
from streamtap.dataset.described import to_metadata
from streamtap.dataset.folder import FolderSource, FolderTarget
from streamtap.dataset.index import Places, write_index
from streamtap.dataset.manifest import Hidden, Manifest, Shard
from streamtap.dataset.names import INDEX, hidden_file
from streamtap.dataset.reader import Dataset, _runs
from streamtap.dataset.shards import ShardWriter
from streamtap.dataset.writer import publish
from streamtap.errors import DatasetDamaged, NotInDataset
from streamtap.tensor_file import make_header

Make = Callable[..., Any]
FLOAT32 = np.dtype(np.float32)
WIDTH = 256


@pytest.fixture(scope="module")
def large(make: Make, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One shard of 8 MiB a layer, twice: 8192 rows of 256 values."""
    folder = tmp_path_factory.mktemp("large") / "set"
    made = make(8192, layers=[0, 7], width=WIDTH, k=1)
    publish(made.contents, FolderTarget(folder))
    return folder, made


@pytest.fixture
def far(large: Any, remote: Make, tmp_path: Path) -> Any:
    """The large dataset behind a network, its index fetched; bytes are counted from here."""
    source = remote(large[0])
    dataset = Dataset(source, CheckedFiles(tmp_path / "checked"))
    assert len(dataset.index) == 8192
    source.fetched.clear()
    return dataset, source, large[1]


def in_shard(rows: Any, shard: int = 0) -> Places:
    numbers = np.asarray(rows, np.int64)
    return Places(np.full(len(numbers), shard, np.int64), numbers)


@pytest.mark.parametrize("dtype", [None, FLOAT32, np.dtype(np.float64)])
def test_few_rows_cost_their_bytes(far: Any, dtype: Any) -> None:
    dataset, source, made = far
    # Ten rows far apart, in no order and one of them twice.
    wanted = [8000, 5, 3000, 5, 700, 1500, 2200, 4100, 5200, 6300, 7400]
    rows = dataset.read_layer(7, in_shard(wanted), dtype)

    assert rows.dtype == (dtype or FLOAT32)
    assert np.array_equal(rows, made.rows[7][wanted])
    assert source.fetched == []
    assert {path for path, *_ in source.ranges} == {hidden_file(7, 0)}
    assert source.range_bytes == 10 * WIDTH * 4 + 4096


def test_rows_close_together_are_asked_for_at_once(far: Any) -> None:
    dataset, source, made = far
    # A gap of up to 64 rows of 1 KiB is cheaper than a request.
    wanted = [100, 164, 101, 300, 365]
    rows = dataset.read_layer(0, in_shard(wanted))

    assert np.array_equal(rows, made.rows[0][wanted])
    start = len(make_header({"hidden.layer_0": (FLOAT32, (8192, WIDTH))})[0])
    found = [((first - start) // 1024, (last - start) // 1024) for _, first, last in source.ranges[1:]]
    assert found == [(100, 165), (300, 301), (365, 366)]


def test_many_rows_are_a_whole_file(far: Any) -> None:
    dataset, source, made = far
    wanted = np.arange(0, 8192, 3)

    assert np.array_equal(dataset.read_layer(0, in_shard(wanted)), made.rows[0][wanted])
    assert source.fetched == [hidden_file(0, 0)]
    assert source.ranges == []


def test_a_whole_file_that_is_here_is_not_asked_for_again(far: Any) -> None:
    dataset, source, _ = far
    for wanted in (np.arange(8192), np.arange(5), np.array([0, 8000])):
        dataset.read_layer(0, in_shard(wanted))

    assert source.fetched == [hidden_file(0, 0)]
    assert source.ranges == []


@pytest.mark.parametrize(("most", "is_whole"), [(3, False), (1, True)])
def test_ranges_that_would_have_to_hold_too_much_are_a_whole_file(
    most: int, is_whole: bool, far: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, source, made = far
    monkeypatch.setattr(reader, "_MOST_RANGES", most)
    wanted = [0, 4000, 8000]

    assert np.array_equal(dataset.read_layer(0, in_shard(wanted)), made.rows[0][wanted])
    assert bool(source.fetched) == is_whole
    assert bool(source.ranges) != is_whole


def test_there_are_never_more_than_256_ranges(make: Make, tmp_path: Path, remote: Make) -> None:
    made = make(600 * 65, layers=[0], width=WIDTH)
    publish(made.contents, FolderTarget(tmp_path / "set"))
    for n_rows in (256, 257, 350):
        source = remote(tmp_path / "set")
        wanted = np.arange(n_rows) * 66
        rows = Dataset(source, CheckedFiles(tmp_path)).read_layer(0, in_shard(wanted))
        assert np.array_equal(rows, made.rows[0][wanted])
        assert hidden_file(0, 0) not in source.fetched
        assert len(source.ranges) == 256 + 1


def test_small_files_are_fetched_whole(make: Make, tmp_path: Path, remote: Make) -> None:
    made = make(50, layers=[0, 1])
    publish(made.contents, FolderTarget(tmp_path / "set"))
    source = remote(tmp_path / "set")
    Dataset(source, CheckedFiles(tmp_path)).read_layer(1, in_shard([3]))

    assert source.fetched == [INDEX, hidden_file(1, 0)]
    assert source.ranges == []


def test_few_logits_cost_their_bytes(make: Make, tmp_path: Path, remote: Make) -> None:
    made = make(6000, layers=(), k=64)
    publish(made.contents, FolderTarget(tmp_path / "set"))
    source = remote(tmp_path / "set")
    values, ids = Dataset(source, CheckedFiles(tmp_path)).read_logits(in_shard([5, 5000]))

    assert np.array_equal(values, made.logits[0][[5, 5000]])
    assert np.array_equal(ids, made.logits[1][[5, 5000]])
    assert source.fetched == [INDEX]
    assert source.range_bytes == 2 * (2 * 64 * 4 + 4096)


def test_what_is_fetched_is_told(far: Any) -> None:
    dataset, _, _ = far
    told: list[int] = []
    counting = Dataset(dataset.source, dataset.checked, told.append)
    counting.read_layer(0, in_shard([1, 5000]))
    counting.read_layer(7, in_shard(np.arange(8192)))

    n_index = counting.manifest.files[hidden_file(7, 0)].size_bytes
    assert sum(told) == 2 * WIDTH * 4 + n_index


def together(folder: Path, n_layers: int, n_rows: int, padding: int = 0) -> dict[int, Any]:
    """A dataset of version 1.0's layout: all layers in one file, whose header may be long."""
    rows = {
        layer: np.random.default_rng(layer).standard_normal((n_rows, WIDTH)).astype(np.float32)
        for layer in range(n_layers)
    }
    path = folder / "tensors" / "hidden_layers_000.safetensors"
    path.parent.mkdir(parents=True)
    writer = ShardWriter(path, {f"hidden.layer_{layer}": (FLOAT32, (n_rows, WIDTH)) for layer in rows})
    for each in rows.values():
        writer.write(each)
    writer.finish()
    if padding:
        content = path.read_bytes()
        length = int.from_bytes(content[:8], "little")
        path.write_bytes(
            (length + padding).to_bytes(8, "little") + content[8 : 8 + length] + b" " * padding + content[8 + length :]
        )
    hidden = Hidden(
        tuple(rows), WIDTH, "float32", "mean", (Shard(n_rows, n_rows, "tensors/hidden_layers_000.safetensors"),)
    )
    metadata = to_metadata(Manifest("m", None, n_rows, hidden, None))
    about = json.loads(metadata["lmprobe:tensors"])
    del about["hidden_layers"]["layout"]
    about["hidden_layers"]["shards"] = [{"num_prompts": n_rows, "file": "tensors/hidden_layers_000.safetensors"}]
    (folder / INDEX).parent.mkdir()
    columns = {
        "text": pa.array(["x"] * n_rows),
        "shard_index": pa.array([0] * n_rows),
        "row_offset": pa.array(range(n_rows)),
    }
    write_index(folder / INDEX, [columns], metadata | {"lmprobe:tensors": json.dumps(about)})
    return rows


@pytest.mark.parametrize("padding", [0, 8, 4096 - 8, 100_000])
def test_one_layer_of_a_file_of_all_costs_that_layer(padding: int, tmp_path: Path, remote: Make) -> None:
    rows = together(tmp_path / "set", 8, 512, padding)
    source = remote(tmp_path / "set")
    dataset = Dataset(source, CheckedFiles(tmp_path))
    found = dataset.read_layer(5, dataset.index.places())

    assert np.array_equal(found, rows[5])
    assert source.fetched == [INDEX]
    head = len(make_header({f"hidden.layer_{layer}": (FLOAT32, (512, WIDTH)) for layer in rows})[0]) + padding
    assert source.range_bytes == max(4096, head) + 512 * WIDTH * 4


def test_every_layer_of_a_file_of_all_is_right(tmp_path: Path, remote: Make) -> None:
    rows = together(tmp_path / "set", 2, 512)
    for source in (remote(tmp_path / "set"), FolderSource(tmp_path / "set")):
        dataset = Dataset(source, CheckedFiles(tmp_path))
        for layer in (0, 1):
            assert np.array_equal(dataset.read_layer(layer, dataset.index.places()), rows[layer])


@pytest.fixture
def small(make: Make, tmp_path: Path) -> Any:
    made = make(9, layers=[0, 3], k=2)
    publish(made.contents, FolderTarget(tmp_path / "set"), shard_max_bytes=64)
    return tmp_path / "set", made


def test_rows_come_in_the_order_asked_for_over_shards(small: Any, tmp_path: Path) -> None:
    folder, made = small
    dataset = Dataset(FolderSource(folder), CheckedFiles(tmp_path))
    wanted = np.array([8, 0, 4, 4, 3, 7, 1])

    assert np.array_equal(dataset.read_layer(3, dataset.index.places().pick(wanted)), made.rows[3][wanted])
    assert dataset.read_layer(3, dataset.index.places().pick(wanted[:0])).shape == (0, 4)
    assert dataset.read_layer(3, dataset.index.places().pick(wanted[:0]), np.dtype(np.float16)).dtype == np.float16


def test_layers_are_ascending_and_absent_ones_are_named(small: Any, tmp_path: Path) -> None:
    dataset = Dataset(FolderSource(small[0]), CheckedFiles(tmp_path))

    assert dataset.layers(None) == (0, 3)
    assert dataset.layers([3, 0, 3]) == (0, 3)
    with pytest.raises(NotInDataset, match=r"holds layers \[0, 3\]; it has no layer -1, 7"):
        dataset.layers([7, 3, -1])


def test_what_a_dataset_does_not_hold_is_named(make: Make, tmp_path: Path) -> None:
    publish(make(3).contents, FolderTarget(tmp_path / "rows"))
    publish(make(3, layers=(), k=2).contents, FolderTarget(tmp_path / "logits"))

    with pytest.raises(NotInDataset, match="rows holds no logits"):
        Dataset(FolderSource(tmp_path / "rows"), CheckedFiles(tmp_path)).read_logits(in_shard([0]))
    with pytest.raises(NotInDataset, match="logits holds no activations"):
        Dataset(FolderSource(tmp_path / "logits"), CheckedFiles(tmp_path)).layers(None)


class Flaky:
    """A source whose first ``times`` fetches of a path give other bytes."""

    def __init__(self, source: Any, path: str, times: int) -> None:
        self._source, self._path, self._times = source, path, times
        self.fetches: list[bool] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def fetch(self, path: str, *, again: bool = False, **how: Any) -> Path:
        file: Path = self._source.fetch(path, again=again, **how)
        if path == self._path:
            self.fetches.append(again)
            if len(self.fetches) <= self._times:
                content = file.read_bytes()
                file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        return file


def test_a_file_that_does_not_match_is_fetched_a_second_time(small: Any, tmp_path: Path, remote: Make) -> None:
    folder, made = small
    source = Flaky(remote(folder), hidden_file(3, 1), 1)
    dataset = Dataset(source, CheckedFiles(tmp_path))  # type: ignore[arg-type]

    assert np.array_equal(dataset.read_layer(3, dataset.index.places()), made.rows[3])
    assert source.fetches == [False, True]


def test_a_file_that_never_matches_is_refused_by_name(small: Any, tmp_path: Path, remote: Make) -> None:
    source = Flaky(remote(small[0]), hidden_file(3, 1), 9)
    dataset = Dataset(source, CheckedFiles(tmp_path))  # type: ignore[arg-type]
    with pytest.raises(
        DatasetDamaged, match=f"^{hidden_file(3, 1)} of user/set is not the file that its manifest describes"
    ):
        dataset.read_layer(3, dataset.index.places())

    assert source.fetches == [False, True]


def test_a_file_is_compared_once(small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[Path] = []
    is_content = checked.is_content
    monkeypatch.setattr(checked, "is_content", lambda file, about: compared.append(file) or is_content(file, about))
    for _ in range(2):
        dataset = Dataset(FolderSource(small[0]), CheckedFiles(tmp_path))
        dataset.read_layer(3, dataset.index.places())

    assert len(compared) == len(set(compared)) == 3


def damaged(folder: Path, tmp_path: Path, path: str, content: bytes) -> Dataset:
    """The dataset without hashes, as other libraries write it, and with one file's content changed."""
    copy = Path(shutil.copytree(folder, tmp_path / "damaged"))
    table = pq.read_table(copy / INDEX)
    metadata = {key: value for key, value in table.schema.metadata.items() if not key.startswith(b"streamtap")}
    pq.write_table(table.replace_schema_metadata(metadata), copy / INDEX)
    (copy / path).write_bytes(content)
    return Dataset(FolderSource(copy), CheckedFiles(tmp_path))


@pytest.mark.parametrize("cut", [0, 5, 20, -1], ids=["empty", "no length", "half a header", "no last byte"])
def test_a_cut_file_without_a_hash_is_one_sentence(cut: int, small: Any, tmp_path: Path) -> None:
    path = hidden_file(3, 1)
    dataset = damaged(small[0], tmp_path, path, (small[0] / path).read_bytes()[:cut])
    with pytest.raises(DatasetDamaged, match=f"^[^\n]*{path}[^\n]*$"):
        dataset.read_layer(3, dataset.index.places())


def test_a_file_of_another_layer_is_one_sentence(small: Any, tmp_path: Path) -> None:
    dataset = damaged(small[0], tmp_path, hidden_file(3, 1), (small[0] / hidden_file(0, 1)).read_bytes())
    with pytest.raises(DatasetDamaged, match=f"^{hidden_file(3, 1)} of .* holds no tensor hidden.layer_3"):
        dataset.read_layer(3, dataset.index.places())


@pytest.mark.parametrize("row", [-1, 4, 2**40])
def test_a_row_that_is_not_there_is_one_sentence(row: int, small: Any, tmp_path: Path) -> None:
    dataset = Dataset(FolderSource(small[0]), CheckedFiles(tmp_path))
    with pytest.raises(DatasetDamaged, match=rf"is \[4, 4\], and its index asks for row {row} of width 4"):
        dataset.read_layer(3, in_shard([0, row, 1]))


@pytest.mark.parametrize("shard", [-1, 3])
def test_a_shard_that_is_not_there_is_one_sentence(shard: int, small: Any, tmp_path: Path) -> None:
    dataset = Dataset(FolderSource(small[0]), CheckedFiles(tmp_path))
    with pytest.raises(DatasetDamaged, match=f"names shard {shard} of 3"):
        dataset.read_layer(3, in_shard([0], shard))


def test_rows_of_another_width_are_one_sentence(make: Make, small: Any, tmp_path: Path) -> None:
    publish(make(9, layers=[3], width=5).contents, FolderTarget(tmp_path / "wide"))
    dataset = damaged(small[0], tmp_path, hidden_file(3, 0), (tmp_path / "wide" / hidden_file(3, 0)).read_bytes())
    with pytest.raises(DatasetDamaged, match=r"is \[9, 5\], and its index asks for row 3 of width 4"):
        dataset.read_layer(3, dataset.index.places())


@pytest.mark.parametrize("cut", [0, 5, 60, 5_000_000], ids=["empty", "no length", "half a header", "half the rows"])
def test_a_cut_remote_file_is_one_sentence(cut: int, large: Any, tmp_path: Path, remote: Make) -> None:
    folder = Path(shutil.copytree(large[0], tmp_path / "cut"))
    path = hidden_file(7, 0)
    (folder / path).write_bytes((folder / path).read_bytes()[:cut])
    dataset = Dataset(remote(folder), CheckedFiles(tmp_path))
    with pytest.raises(DatasetDamaged, match=f"^[^\n]*{path}[^\n]*$"):
        dataset.read_layer(7, in_shard([1, 8000]))


@settings(deadline=None)
@given(rows=st.lists(st.integers(0, 300), unique=True, max_size=40), gap=st.integers(1, 20))
def test_runs_hold_every_row_and_no_wide_gap(rows: list[int], gap: int) -> None:
    runs = _runs(np.array(sorted(rows), np.int64), gap)

    assert all(any(start <= row < stop for start, stop in runs) for row in rows)
    assert all(start in rows and stop - 1 in rows for start, stop in runs)
    assert all(after[0] - before[1] >= gap for before, after in pairwise(runs))
    for start, stop in runs:
        inside = [row for row in sorted(rows) if start <= row < stop]
        assert all(after - before <= gap for before, after in pairwise(inside))
