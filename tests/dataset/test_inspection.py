"""What is in a dataset, without its rows."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamtap.dataset.checked import CheckedFiles
from streamtap.dataset.folder import FolderSource, FolderTarget
from streamtap.dataset.inspection import DatasetInfo
from streamtap.dataset.names import INDEX, SIDECAR
from streamtap.dataset.reader import Dataset
from streamtap.dataset.writer import publish

Make = Callable[..., Any]


@pytest.fixture
def written(make: Make, tmp_path: Path) -> Path:
    publish(
        make(9, layers=[3, 0], dtype="float16", k=2, labels=[1] * 9).contents,
        FolderTarget(tmp_path / "set"),
        shard_max_bytes=32,
    )
    return tmp_path / "set"


def test_what_it_says_costs_the_end_of_the_index(written: Path, remote: Make, tmp_path: Path) -> None:
    source = remote(written)
    info = DatasetInfo(Dataset(source, CheckedFiles(tmp_path)))
    said = {
        "name": "user/set",
        "version": None,
        "model_name": "someone/a-model",
        "model_commit": "c0ffee",
        "available_layers": [0, 3],
        "num_prompts": 9,
        "pooling": "last_token",
        "dtype": "float16",
        "hidden": 4,
        "format_version": "2.0",
        "index_bytes": (written / INDEX).stat().st_size,
    }

    assert {key: getattr(info, key) for key in said} == said
    assert info.columns["label"] == "int32"
    assert set(info.tensor_descriptors) == {"hidden_layers", "logits_topk"}
    assert repr(info) == (
        "DatasetInfo(model_name='someone/a-model', num_prompts=9, available_layers=[0, 3], "
        "pooling='last_token', dtype='float16')"
    )
    assert source.fetched == []
    assert len(source.ranges) == 1
    assert info.prompts == [f"prompt {number}" for number in range(9)]
    assert source.fetched == [INDEX]


def test_costs_are_the_files_sizes(written: Path, tmp_path: Path) -> None:
    info = DatasetInfo(Dataset(FolderSource(written), CheckedFiles(tmp_path)))
    files = list((written / "tensors").iterdir())

    assert info.layer_bytes(3) == sum(file.stat().st_size for file in files if "layer003" in file.name)
    assert info.layer_bytes(1) == 0
    assert info.total_bytes == sum(file.stat().st_size for file in files)


@pytest.mark.parametrize(
    "name", ["v2-pooled", "v2-full-sequence", "v2-extraction-bf16", "v2-pooled-logits-ppl", "v1-0-colocated"]
)
def test_costs_that_are_not_recorded_are_about_right(name: str, samples: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        info = DatasetInfo(Dataset(FolderSource(samples / name), CheckedFiles(tmp_path)))
    files = list((samples / name / "tensors").iterdir())
    total = sum(file.stat().st_size for file in files)
    layer = sum(file.stat().st_size for file in files if "layer015" in file.name or "layers" in file.name)

    assert 0.98 * total < info.total_bytes <= total
    assert 0.98 * layer < info.layer_bytes(15) <= layer


@pytest.mark.parametrize(
    ("counts", "k", "pooling"), [([1, 2], 0, "none"), (None, 2, None)], ids=["full sequence", "logits alone"]
)
def test_kinds_of_datasets(counts: Any, k: int, pooling: str | None, make: Make, tmp_path: Path) -> None:
    made = make(2, counts=counts, layers=() if k else (5,), k=k)
    publish(made.contents, FolderTarget(tmp_path / "set"))
    info = DatasetInfo(Dataset(FolderSource(tmp_path / "set"), CheckedFiles(tmp_path)))

    assert info.pooling == pooling
    assert info.available_layers == ([] if k else [5])
    assert info.hidden == (None if k else 4)
    assert info.dtype == (None if k else "float32")


def test_a_layer_of_a_large_file_of_all_costs_its_part(samples: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(samples / "v1-0-colocated", tmp_path / "large"))
    said = json.loads((folder / SIDECAR).read_text())
    about = said["tensors"]["hidden_layers"]
    about |= {"layers": list(range(30)), "shards": [about["shards"][0] | {"num_prompts": 1000}]}
    (folder / SIDECAR).write_text(json.dumps(said))
    with pytest.warns(UserWarning, match="older format"):
        info = DatasetInfo(Dataset(FolderSource(folder), CheckedFiles(tmp_path)))

    assert info.layer_bytes(15) == 1000 * 576 * 4
    assert info.total_bytes == 30 * info.layer_bytes(15)
