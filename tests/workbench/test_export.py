from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch

from streamtap.activations import Activations
from streamtap.engines.transformers import TransformersEngine
from streamtap.errors import InvalidInput
from streamtap.spec import as_prompts
from streamtap.testing.models import tiny_model
from streamtap.testing.tokenizers import tiny_tokenizer
from streamtap.workbench import export as export_module
from streamtap.workbench.export import check_folder, export_rows, write_layer
from streamtap.workbench.unified_cache import UnifiedCache

PROMPTS = as_prompts(["The cat sat.", "Hello", [{"role": "user", "content": "Hi"}], [5, 6, 7]])


@pytest.fixture(scope="module")
def engine() -> TransformersEngine:
    return TransformersEngine(tiny_model("llama"), tiny_tokenizer(), name="tiny")


@pytest.fixture
def cache(engine: TransformersEngine, tmp_path: Path) -> Iterator[UnifiedCache]:
    with _cache(engine, tmp_path) as made:
        yield made


def _cache(engine: TransformersEngine, folder: Path, **options: Any) -> UnifiedCache:
    return UnifiedCache(engine, cache_dir=folder / "cache", progress=False, **options)


def _manifest(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return loaded


def _files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_files_hold_what_the_cache_holds(engine: TransformersEngine, tmp_path: Path) -> None:
    with _cache(engine, tmp_path, cache_pooled=False, layers=[0, 2]) as cache:
        out = export_rows(cache, PROMPTS, tmp_path / "out")
        expected = cache.rows(PROMPTS)

    for layer in (0, 2):
        found = load_file(out / f"layer_{layer:03d}.safetensors")
        assert found["rows"].tobytes() == expected.acts[layer].tobytes()
        assert found["rows"].shape == expected.acts[layer].shape == (expected.offsets[-1], 32)
        assert found["offsets"].tolist() == expected.offsets.tolist()
        assert found["token_ids"].tolist() == expected.token_ids.tolist()
        assert found["positions"].tolist() == expected.positions.tolist()
    assert sorted(file.name for file in out.iterdir()) == [
        "layer_000.safetensors",
        "layer_002.safetensors",
        "manifest.json",
        "prompts.parquet",
    ]


def test_bfloat16_stays_bfloat16(tmp_path: Path) -> None:
    engine = TransformersEngine(tiny_model("llama", dtype=torch.bfloat16), tiny_tokenizer())
    with _cache(engine, tmp_path) as cache:
        out = export_rows(cache, PROMPTS, tmp_path / "out")
        expected = cache.rows(PROMPTS).torch()[1]

    found = load_torch(out / "layer_001.safetensors")["rows"]
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)
    assert _manifest(out)["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    "cut",
    [np.s_[::2], np.s_[5:7], np.s_[:, ::2], np.s_[:, -1:], np.s_[::-1]],
    ids=["odd", "few", "thin", "one", "back"],
)
def test_a_slice_is_written_as_it_reads_and_takes_its_own_size(cut: Any, cache: UnifiedCache, tmp_path: Path) -> None:
    """Case V32: the neighbours of a slice are not written, nor read in its place."""
    values = np.random.default_rng(0).normal(size=(4096, 512)).astype(np.float32)[cut]
    numbers = np.arange(2 * len(values), dtype=np.int32)[::2]
    base = cache.rows(PROMPTS)
    acts = replace(base, acts={1: values}, offsets=np.arange(len(values) + 1), token_ids=numbers, positions=numbers)
    assert isinstance(acts, Activations)

    write_layer(acts, 1, tmp_path / "layer.safetensors")

    found = load_file(tmp_path / "layer.safetensors")
    assert np.array_equal(found["rows"], values)
    assert np.array_equal(found["token_ids"], numbers)
    payload = sum(array.nbytes for array in found.values())
    assert (tmp_path / "layer.safetensors").stat().st_size <= max(1.01 * payload, payload + 512)


def test_the_table_has_a_row_for_each_prompt(engine: TransformersEngine, tmp_path: Path) -> None:
    with _cache(engine, tmp_path, truncate="right") as cache:
        prompts = [*PROMPTS, *as_prompts(["x" * 300])]
        table = pq.read_table(export_rows(cache, prompts, tmp_path / "out", with_text=True) / "prompts.parquet")
        bare = pq.read_table(export_rows(cache, prompts, tmp_path / "bare") / "prompts.parquet")
        perplexity = cache.get_perplexity(prompts)

    assert table["index"].to_pylist() == [0, 1, 2, 3, 4]
    assert table["num_tokens"].to_pylist()[:2] == [13, 6]
    assert table["num_tokens"].to_pylist()[3:] == [3, 256]
    assert table["truncated_from"].to_pylist() == [0, 0, 0, 0, 301]
    found = np.stack([table[f"perplexity_{name}"].to_numpy() for name in ("mean", "min", "max")], axis=1)
    assert np.array_equal(found, perplexity, equal_nan=True)
    assert table["text"].to_pylist()[:4] == ["The cat sat.", "Hello", '[{"role": "user", "content": "Hi"}]', None]
    assert bare.column_names == table.column_names[:-1]


def test_logits_are_written_where_they_are_kept(engine: TransformersEngine, tmp_path: Path) -> None:
    options = {"cache_logits": True, "logit_top_k": 3, "logit_positions": "all", "compute_perplexity": False}
    with _cache(engine, tmp_path, **options) as cache:
        out = export_rows(cache, PROMPTS, tmp_path / "out")
        expected = cache.get_logits(PROMPTS)

    found = load_file(out / "logits.safetensors")
    assert expected.ids is not None
    assert np.array_equal(found["values"], expected.values)
    assert np.array_equal(found["ids"], expected.ids)
    assert found["offsets"].tolist() == expected.offsets.tolist()
    assert "perplexity_mean" not in pq.read_schema(out / "prompts.parquet").names


def test_the_manifest_names_every_file_with_size_and_hash(cache: UnifiedCache, tmp_path: Path) -> None:
    out = export_rows(cache, PROMPTS, tmp_path / "out")

    manifest, files = _manifest(out), _files(out)
    assert manifest["files"] == {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for name, content in files.items()
        if name != "manifest.json"
    }
    assert (manifest["format"], manifest["version"]) == ("streamtap-rows", 1)
    assert (manifest["prompts"], manifest["rows"], manifest["layers"]) == (4, 4, [0, 1, 2])
    assert (manifest["model"]["model"], manifest["model"]["hidden"]) == ("tiny", 32)
    assert manifest["asked"]["pooling"] == "last_token"
    with safe_open(out / "layer_002.safetensors", framework="np") as opened:
        assert opened.metadata() == {"layer": "2", "pooling": "last_token", "model": "tiny"}
    assert len({file.stat().st_mode for file in out.iterdir()}) == 1


def test_a_folder_with_anything_in_it_is_refused(cache: UnifiedCache, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    (tmp_path / "empty").mkdir()

    for overwrite in (False, True):
        with pytest.raises(InvalidInput, match="name another folder"):
            export_rows(cache, PROMPTS, tmp_path / "mine", overwrite=overwrite)
    with pytest.raises(InvalidInput, match="notes.txt is a file; name a folder"):
        check_folder(tmp_path / "mine" / "notes.txt")
    assert (tmp_path / "mine" / "notes.txt").read_text() == "mine"
    assert export_rows(cache, PROMPTS, tmp_path / "empty") == tmp_path / "empty"


def test_only_an_export_is_overwritten(cache: UnifiedCache, tmp_path: Path) -> None:
    out = export_rows(cache, PROMPTS, tmp_path / "out")
    with pytest.raises(InvalidInput, match="out is not empty"):
        export_rows(cache, PROMPTS[:2], out)

    export_rows(cache, PROMPTS[:2], out, overwrite=True)

    assert _manifest(out)["prompts"] == 2
    assert sorted(file.name for file in tmp_path.iterdir()) == ["cache", "out"]
    (out / "notes.txt").write_text("mine")
    with pytest.raises(InvalidInput, match="holds files that are not of an export"):
        export_rows(cache, PROMPTS, out, overwrite=True)


@pytest.mark.parametrize("step", ["write_layer", "write_columns", "_sha256", "_put_in_place"])
def test_a_failure_leaves_what_was_there(
    step: str, cache: UnifiedCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _files(export_rows(cache, PROMPTS[:2], tmp_path / "out"))

    def fail(*_arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export_module, step, fail)
    for name in ("out", "new"):
        with pytest.raises(OSError, match="No space left"):
            export_rows(cache, PROMPTS, tmp_path / name, overwrite=True)

    assert _files(tmp_path / "out") == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["cache", "out"]
