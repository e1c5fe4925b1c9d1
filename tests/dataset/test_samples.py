"""Datasets as another library wrote them read equal to what that library read from them."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from streamtap.dataset.checked import CheckedFiles
from streamtap.dataset.folder import FolderSource
from streamtap.dataset.inspection import DatasetInfo
from streamtap.dataset.names import INDEX, SIDECAR
from streamtap.dataset.reader import Dataset
from streamtap.errors import DatasetDamaged, DatasetNotFound, Unsupported

FLOAT32 = np.dtype(np.float32)
OLDER = {"v1-0-colocated": "1.0", "v1-2-pooled-logits": "1.2"}
NEWER = [
    "v2-extraction-bf16",
    "v2-full-sequence",
    "v2-pooled",
    "v2-pooled-logits-ppl",
    "v2-pooled-mean",
    "v2-pooled-multishard",
    "v2-string-labels",
    "v2-unlabelled-duplicates",
    "v2-upgraded-from-v1-2",
]
FULL = ["v2-extraction-bf16", "v2-full-sequence"]
LOGITS = ["v1-2-pooled-logits", "v2-pooled-logits-ppl", "v2-upgraded-from-v1-2"]

OpenDataset = Callable[[Path], Dataset]


@pytest.fixture
def opened(tmp_path: Path) -> OpenDataset:
    return lambda folder: Dataset(FolderSource(folder), CheckedFiles(tmp_path / "checked"))


@pytest.fixture(scope="module")
def expected(samples: Path) -> dict[str, NDArray[Any]]:
    with np.load(samples / "expected.npz", allow_pickle=False) as found:
        return dict(found)


def quietly(dataset: Dataset) -> Dataset:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert dataset.manifest.n_prompts == len(dataset.index)
    return dataset


@pytest.mark.parametrize("name", [*OLDER, *NEWER])
def test_every_layer_reads_equal(
    name: str, samples: Path, opened: OpenDataset, expected: dict[str, NDArray[Any]]
) -> None:
    dataset = quietly(opened(samples / name))
    places = dataset.index.places()
    there = {f"{name}/layer_{layer}" for layer in dataset.layers(None)}

    assert there == {key for key in expected if key.startswith(f"{name}/layer_")}
    for layer in dataset.layers(None):
        assert np.array_equal(dataset.read_layer(layer, places, FLOAT32), expected[f"{name}/layer_{layer}"])


@pytest.mark.parametrize("name", FULL)
def test_every_token_row_reads_equal(
    name: str, samples: Path, opened: OpenDataset, expected: dict[str, NDArray[Any]]
) -> None:
    dataset = opened(samples / name)
    tokens, offsets = dataset.index.token_places()

    assert np.array_equal(np.diff(offsets), expected[f"{name}/tokens/lengths"])
    for layer in dataset.layers(None):
        assert np.array_equal(dataset.read_layer(layer, tokens, FLOAT32), expected[f"{name}/tokens/layer_{layer}"])


@pytest.mark.parametrize("name", LOGITS)
def test_logits_read_equal(name: str, samples: Path, opened: OpenDataset, expected: dict[str, NDArray[Any]]) -> None:
    dataset = quietly(opened(samples / name))
    values, ids = dataset.read_logits(dataset.index.logit_places())

    assert np.array_equal(values, expected[f"{name}/logits_topk.values"])
    assert np.array_equal(ids, expected[f"{name}/logits_topk.indices"])
    assert (values.dtype, ids.dtype) == (np.float32, np.int32)


@pytest.mark.parametrize("name", [*OLDER, *NEWER])
def test_labels_read_equal_and_partly_null_ones_keep_their_nulls(
    name: str, samples: Path, opened: OpenDataset, expected: dict[str, NDArray[Any]]
) -> None:
    dataset = quietly(opened(samples / name))
    labels, raw = dataset.index.labels(), pq.read_table(samples / name / INDEX).column("label").to_pylist()

    if all(label is None for label in raw):
        assert labels is None
    else:
        assert labels is not None
        assert labels.tolist() == raw
    if f"{name}/labels" in expected:
        assert np.array_equal(np.asarray(labels), expected[f"{name}/labels"])
        assert np.asarray(labels).dtype == np.int64


def test_string_labels_with_a_null_are_objects(samples: Path, opened: OpenDataset) -> None:
    labels = opened(samples / "v2-string-labels").index.labels()

    assert labels is not None
    assert labels.dtype == object
    assert {type(label) for label in labels} == {str, type(None)}


def test_duplicate_prompts_keep_their_rows(
    samples: Path, opened: OpenDataset, expected: dict[str, NDArray[Any]]
) -> None:
    dataset = opened(samples / "v2-unlabelled-duplicates")
    texts = dataset.index.texts()

    assert len(texts) == 6
    assert max(map(texts.count, texts)) == 3
    assert dataset.index.labels() is None


@pytest.mark.parametrize(("name", "version"), OLDER.items())
def test_an_older_version_reads_with_a_hint(name: str, version: str, samples: Path, opened: OpenDataset) -> None:
    folder = samples / name
    with pytest.warns(UserWarning, match=f"older format version {version}.*streamtap dataset upgrade {folder}"):
        assert opened(folder).manifest.format_version == version


@pytest.mark.parametrize("name", NEWER)
def test_the_present_version_reads_without_a_word(name: str, samples: Path, opened: OpenDataset) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert opened(samples / name).manifest.format_version == "2.0"


@pytest.mark.parametrize("name", [*OLDER, *NEWER])
def test_the_footer_says_what_the_index_says(name: str, samples: Path, opened: OpenDataset) -> None:
    dataset = quietly(opened(samples / name))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        info = DatasetInfo(dataset)

    assert info.manifest == dataset.manifest
    assert info.num_prompts == len(dataset.index)
    assert tuple(info.columns) == dataset.index.columns
    assert info.model_name == "example/SmolLM2-135M-Instruct-dequant"
    assert info.model_commit == "0123456789abcdef0123456789abcdef01234567"


def test_layers_of_1_0_lie_together_in_the_file_that_is_named(samples: Path, opened: OpenDataset) -> None:
    dataset = quietly(opened(samples / "v1-0-colocated"))

    assert dataset.manifest.tensor_files() == ["tensors/hidden_layers_000.safetensors"]
    assert not dataset.hidden.per_layer


def index_with(folder: Path, changes: dict[str, Any]) -> None:
    """Replace some of the index's metadata; None takes a key away."""
    table = pq.read_table(folder / INDEX)
    metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    metadata |= {f"lmprobe:{key}": json.dumps(value) for key, value in changes.items()}
    gone = [f"lmprobe:{key}" for key, value in changes.items() if value is None]
    for key in gone:
        metadata.pop(key)
    pq.write_table(table.replace_schema_metadata(metadata), folder / INDEX)


@pytest.fixture
def copied(samples: Path, tmp_path: Path) -> Callable[[str], Path]:
    def copy(name: str) -> Path:
        return Path(shutil.copytree(samples / name, tmp_path / "copied" / name))

    return copy


def test_an_upgraded_1_0_repository_reads_by_the_files_it_names(
    copied: Callable[[str], Path], opened: OpenDataset, expected: dict[str, NDArray[Any]]
) -> None:
    folder = copied("v1-0-colocated")
    said = json.loads((folder / SIDECAR).read_text())
    # Which no file of it matches: what another library's upgrade leaves.
    said["tensors"]["hidden_layers"]["file_pattern"] = "tensors/hidden_layer{layer:03d}_shard{shard:03d}.safetensors"
    index_with(folder, {**said, "format_version": "2.0"})
    (folder / SIDECAR).unlink()
    dataset = opened(folder)

    for layer in (15, 29):
        rows = dataset.read_layer(layer, dataset.index.places(), FLOAT32)
        assert np.array_equal(rows, expected[f"v1-0-colocated/layer_{layer}"])


@pytest.mark.parametrize("place", ["index", "sidecar"])
def test_very_old_metadata_says_tensor_types(
    place: str, copied: Callable[[str], Path], opened: OpenDataset, expected: dict[str, NDArray[Any]]
) -> None:
    folder = copied("v1-0-colocated")
    said = json.loads((folder / SIDECAR).read_text())
    said["tensor_types"] = said.pop("tensors")
    if place == "index":
        index_with(folder, {**said, "format_version": "2.0"})
        (folder / SIDECAR).unlink()
    else:
        (folder / SIDECAR).write_text(json.dumps(said))
    dataset = quietly(opened(folder))

    rows = dataset.read_layer(15, dataset.index.places(), FLOAT32)
    assert np.array_equal(rows, expected["v1-0-colocated/layer_15"])


def test_a_newer_minor_version_loads_with_a_warning(
    copied: Callable[[str], Path], opened: OpenDataset, expected: dict[str, NDArray[Any]]
) -> None:
    folder = copied("v2-pooled")
    index_with(folder, {"format_version": "2.1", "novelty": {"who": "knows"}})
    dataset = opened(folder)
    with pytest.warns(UserWarning, match="version 2.1, newer than the 2.0"):
        rows = dataset.read_layer(0, dataset.index.places(), FLOAT32)

    assert np.array_equal(rows, expected["v2-pooled/layer_0"])


def test_a_newer_major_version_is_refused_with_the_command_that_upgrades(
    copied: Callable[[str], Path], opened: OpenDataset
) -> None:
    folder = copied("v2-pooled")
    index_with(folder, {"format_version": "3.0", "tensors": {"all": "different"}})
    dataset = opened(folder)

    for read in (lambda: dataset.manifest, lambda: dataset.footer):
        with pytest.raises(Unsupported, match="version 3.0.*pip install --upgrade streamtap"):
            read()


def test_an_index_without_any_metadata_is_no_dataset(copied: Callable[[str], Path], opened: OpenDataset) -> None:
    folder = copied("v1-2-pooled-logits")
    (folder / SIDECAR).unlink()

    with pytest.raises(DatasetNotFound, match="not a dataset of this format"):
        opened(folder).footer  # noqa: B018


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"{}", b"\xff\xfe", b"[" * 100_000, b'{"model": 3}'])
def test_a_damaged_sidecar_is_one_sentence(content: bytes, copied: Callable[[str], Path], opened: OpenDataset) -> None:
    folder = copied("v1-2-pooled-logits")
    (folder / SIDECAR).write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(DatasetDamaged) as caught:
            opened(folder).footer  # noqa: B018

    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)
