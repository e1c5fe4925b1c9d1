"""A run's statistics are those of the rows in its files, BOS left out, to the bit the same however it was run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from streamtap.errors import HarvestFailed
from streamtap.harvest.asked import HarvestAsk
from streamtap.harvest.plan import read_prompts
from streamtap.harvest.run import run_harvest
from streamtap.harvested.folder_place import FolderPlace
from streamtap.spec import Projection
from streamtap.testing.characters import BOS
from streamtap.testing.fake_engine import FakeEngine

PROMPTS: list[Any] = [f"prompt {i} {'x' * (i * 11 % 29)}" for i in range(50)]
#: BOS in the middle, no BOS at all, and BOS alone.
PROMPTS += [[30, BOS, 31, 32], [33, 34], [BOS]]


def harvest(folder: Path, ask: HarvestAsk, *, engine: FakeEngine | None = None, **more: Any) -> None:
    engine = engine or FakeEngine()
    tokens = read_prompts(PROMPTS, engine.tokenizer, add_special_tokens=ask.add_special_tokens)
    run_harvest(engine, tokens, FolderPlace(folder), ask, spool=folder / ".spool", **more)


def rows_of(folder: Path, *, keep_bos: bool = False) -> NDArray[np.float64]:
    """All rows of the shards, float64 [layers, rows, width], but for those of BOS."""
    found = []
    for file in sorted(folder.glob("shard_*.safetensors")):
        held = load_file(file)
        for name in [name for name in held if name.startswith("prompt_")]:
            index = name.removeprefix("prompt_")
            tokens = held[f"tokens_{index}"]
            positions = held.get(f"positions_{index}", np.arange(len(tokens)))
            keep = slice(None) if keep_bos else tokens[positions] != BOS
            found.append(held[name].astype(np.float64)[:, keep])
    return np.concatenate(found, axis=1)


def check(folder: Path, *, keep_bos: bool = False) -> None:
    rows = rows_of(folder, keep_bos=keep_bos)
    said = load_file(folder / "stats.safetensors")
    manifest = json.loads((folder / "manifest.json").read_text())
    assert (said["mean"].dtype, said["std"].dtype) == (np.float32, np.float32)
    np.testing.assert_allclose(said["mean"], rows.mean(axis=1), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(said["std"], rows.std(axis=1), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(manifest["mean_token_norm"], np.linalg.norm(rows, axis=2).mean(axis=1), rtol=1e-12)
    assert said["layer_indices"].tolist() == manifest["layer_indices"]
    assert manifest["statistics"] == {"file": "stats.safetensors", "count": rows.shape[1], "excluded": ["bos"]}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("positions", ["all", "last", "-1:"])
def test_they_are_of_the_rows_in_the_files(tmp_path: Path, dtype: Any, positions: Any) -> None:
    harvest(tmp_path, HarvestAsk(layers="all", dtype=dtype, positions=positions, shard_size=8))

    check(tmp_path)


@pytest.mark.parametrize("pooling", ["last_token", "first_token"])
def test_a_pooled_row_of_bos_is_left_out_too(tmp_path: Path, pooling: Any) -> None:
    harvest(tmp_path, HarvestAsk(layers="all", pooling=pooling, shard_size=8))

    check(tmp_path)


@pytest.mark.parametrize("pooling", ["mean", "max"])
def test_a_row_made_of_many_is_no_row_of_bos(tmp_path: Path, pooling: Any) -> None:
    harvest(tmp_path, HarvestAsk(layers="all", pooling=pooling, shard_size=8))

    check(tmp_path, keep_bos=True)


def test_they_are_of_products_where_those_are_kept(tmp_path: Path) -> None:
    directions = np.random.default_rng(0).normal(size=(5, 8))
    harvest(tmp_path, HarvestAsk(layers=[1, 2], projection=Projection.onto(directions), shard_size=8))

    check(tmp_path)


def test_a_large_mean_does_not_eat_the_spread(tmp_path: Path) -> None:
    """A sum of squares would lose it: the massive dimensions of real models are of this kind."""

    class Far(FakeEngine):
        def rows(self, *args: Any, **named: Any) -> NDArray[Any]:
            return super().rows(*args, **named) * np.float32(1e-2) + np.float32(3e3)

    harvest(tmp_path, HarvestAsk(layers=[1], dtype="float32", shard_size=8), engine=Far())

    rows = rows_of(tmp_path)
    np.testing.assert_allclose(load_file(tmp_path / "stats.safetensors")["std"], rows.std(axis=1), rtol=1e-6)


def test_no_row_at_all_is_zero_and_finite(tmp_path: Path) -> None:
    engine = FakeEngine()
    tokens = read_prompts([[BOS], [BOS]], engine.tokenizer)
    ask = HarvestAsk(layers=[1])
    manifest = run_harvest(engine, tokens, FolderPlace(tmp_path), ask, spool=tmp_path / ".spool")

    said = load_file(tmp_path / "stats.safetensors")
    assert manifest.statistics["count"] == 0
    assert not said["mean"].any()
    assert not said["std"].any()
    assert manifest.mean_token_norm == (0.0,)


@pytest.mark.parametrize("stops", [[3], [1, 5, 2], [2] * 8])
def test_a_run_in_pieces_has_the_same_bits(tmp_path: Path, stops: list[int]) -> None:
    ask = HarvestAsk(layers="all", shard_size=8)
    harvest(tmp_path / "one", ask, run_id="x")
    for stop in stops:
        calls = iter(range(1000))
        try:
            harvest(tmp_path / "two", ask, run_id="x", should_stop=lambda calls=calls, stop=stop: next(calls) >= stop)
        except HarvestFailed:
            continue
    harvest(tmp_path / "two", ask, run_id="x")

    for name in ("stats.safetensors", "manifest.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
