from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file, save_file

from streamtap.dataset.names import INDEX
from streamtap.errors import DatasetNotFound
from streamtap.workbench.dataset_rows import load_activations
from streamtap.workbench.dataset_tensors import load_activation_dataset
from streamtap.workbench.open_dataset import fetch_dataset_metadata
from streamtap.workbench.upgrade import upgrade_dataset_format, verify_dataset

Bench = Any
FilesOf = Callable[[Path], dict[str, tuple[int, bytes]]]
OLD = ["v1-0-colocated", "v1-2-pooled-logits"]
PROMPTS = ["The sky", "is blue at noon", "x", "and red", "in the evening"]


@pytest.mark.parametrize("sample", OLD)
def test_an_old_dataset_becomes_new_and_no_tensor_moves(
    sample: str, bench: Bench, files_of: FilesOf, expected: dict[str, Any]
) -> None:
    where = bench.sample(sample)
    before, old = files_of(where), pq.read_table(where / INDEX)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the hint to upgrade is being followed
        assert upgrade_dataset_format(where) == str(where)
        info = fetch_dataset_metadata(where)
        acts, labels = load_activations(where, return_labels=True)
        tensors, _ = load_activation_dataset(where)
    after = files_of(where)

    assert info.format_version == "2.0"
    assert set(before) - set(after) == {name for name in ("lmprobe_info.json", "_stage_complete") if name in before}
    assert {k: v for k, v in after.items() if k.startswith("tensors/")} == {
        k: v for k, v in before.items() if k.startswith("tensors/")
    }
    for layer in acts:
        assert np.array_equal(acts[layer], expected[f"{sample}/layer_{layer}"])
        assert np.array_equal(tensors[f"hidden.layer_{layer}"].numpy(), expected[f"{sample}/layer_{layer}"])
    new = pq.read_table(where / INDEX)
    assert labels.tolist() == old["label"].to_pylist()
    assert new.column_names == [name for name in old.column_names if not name.endswith("_hidden")]
    assert all(new[name].equals(old[name]) for name in new.column_names)
    assert {"note", "score", "source"} <= set(new.column_names)
    assert verify_dataset(where, show_progress=False).sound

    again = files_of(where)
    assert upgrade_dataset_format(where) == str(where)
    assert files_of(where) == again


@pytest.mark.parametrize("sample", OLD)
def test_a_dry_run_and_a_kept_sidecar(sample: str, bench: Bench, files_of: FilesOf) -> None:
    where = bench.sample(sample)
    before = files_of(where)
    assert upgrade_dataset_format(where, dry_run=True) == str(where)
    assert files_of(where) == before

    upgrade_dataset_format(where, remove_json=False)
    after = files_of(where)
    assert {name for name in before if after.get(name) != before[name]} == {INDEX}
    assert fetch_dataset_metadata(where).format_version == "2.0"


@pytest.mark.parametrize("sample", ["v2-pooled", "v2-extraction-bf16", "v2-upgraded-from-v1-2"])
def test_a_dataset_of_version_2_is_left_as_it_is(sample: str, bench: Bench, files_of: FilesOf) -> None:
    where = bench.sample(sample)
    before = files_of(where)

    assert upgrade_dataset_format(where) == str(where)
    assert files_of(where) == before


def test_where_there_is_nothing_to_upgrade(bench: Bench) -> None:
    with pytest.raises(DatasetNotFound, match="holds no activation dataset"):
        upgrade_dataset_format(bench.root / "none")
    (bench.root / "empty").mkdir()
    with pytest.raises(DatasetNotFound, match="holds no activation dataset"):
        upgrade_dataset_format(bench.root / "empty")


@pytest.mark.filterwarnings("ignore:.*older format version")
@pytest.mark.parametrize("sample", [*OLD, "v2-pooled-multishard", "v2-full-sequence", "v2-pooled-logits-ppl"])
def test_a_sound_dataset_of_others_is_sound(sample: str, bench: Bench) -> None:
    found = verify_dataset(bench.sample(sample), show_progress=False)

    assert (found.sound, found.faults, found.hashed) == (True, (), 0)
    assert found.prompts == 12
    assert found.files == len(list((bench.root / sample / "tensors").iterdir()))


@pytest.fixture
def ours(bench: Bench) -> Path:
    bench.fill(PROMPTS, cache_pooled=False, cache_logits=True, logit_top_k=3)
    return Path(bench.push(PROMPTS, shard_max_bytes=200))


def test_a_sound_dataset_of_ours_has_every_file_hashed(ours: Path) -> None:
    found = verify_dataset(ours, show_progress=False)

    assert found.sound
    shards = list((ours / "tensors").iterdir())
    assert found.hashed == found.files == len(shards) > 4
    assert found.read_bytes == sum(file.stat().st_size for file in shards)


def test_a_flipped_byte_is_found(ours: Path) -> None:
    verify_dataset(ours, show_progress=False)  # what was right once is read again
    shard = ours / "tensors" / "hidden_layer002_shard001.safetensors"
    about, content = shard.stat(), bytearray(shard.read_bytes())
    content[-3] ^= 1
    shard.write_bytes(bytes(content))
    shutil.copystat(ours / "README.md", shard)
    found = verify_dataset(ours, show_progress=False)

    assert shard.stat().st_size == about.st_size
    assert found.faults == (
        "tensors/hidden_layer002_shard001.safetensors is not the file that the manifest describes.",
    )
    assert not found.sound


def test_a_missing_and_a_cut_shard_are_found(ours: Path) -> None:
    (ours / "tensors" / "logits_topk_000.safetensors").unlink()
    shard = ours / "tensors" / "hidden_layer000_shard000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-4])
    faults = verify_dataset(ours, show_progress=False).faults

    assert len(faults) == 2
    assert any("holds no file tensors/logits_topk_000.safetensors" in fault for fault in faults)
    assert any("hidden_layer000_shard000.safetensors is cut short" in fault for fault in faults)


@pytest.mark.parametrize(
    ("column", "value", "what"),
    [
        ("row_offset", 99, "1 places of rows in the index"),
        ("shard_index", 77, "1 places of rows in the index"),
        ("row_offset_logits", -1, "1 places of logits in the index"),
        ("token_shard_offsets", 99, "1 places of token rows in the index"),
    ],
)
def test_an_index_that_points_outside_is_found(column: str, value: int, what: str, ours: Path) -> None:
    table = pq.read_table(ours / INDEX)
    values = table[column].to_pylist()
    values[1] = [value, *values[1][1:]] if isinstance(values[1], list) else value
    field = table.schema.field(column)
    changed = table.set_column(table.schema.get_field_index(column), column, pa.array(values, field.type))
    with pq.ParquetWriter(ours / INDEX, changed.schema) as writer:
        writer.write_table(changed)
        writer.add_key_value_metadata({k.decode(): v.decode() for k, v in (table.schema.metadata or {}).items()})
    faults = verify_dataset(ours, show_progress=False).faults

    assert len(faults) == 1
    assert faults[0].startswith(what)


def test_a_layer_that_holds_fewer_rows_than_the_others_is_found(bench: Bench) -> None:
    """Nothing recorded its hash."""
    where = bench.sample("v2-pooled")
    shard = where / "tensors" / "hidden_layer015_shard000.safetensors"
    save_file({"hidden.layer_15": load_file(shard)["hidden.layer_15"][:5]}, shard)

    faults = verify_dataset(where, show_progress=False).faults

    assert len(faults) == 1
    assert "hidden_layer015_shard000.safetensors does not hold hidden.layer_15 with the 12 rows" in faults[0]
