"""The loop: a run's files hold what the engine gave, whole, once, and a manifest that comes last says so."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from streamtap.engines.base import IN_MEMORY
from streamtap.errors import (
    CaptureMissed,
    HarvestFailed,
    HarvestMismatch,
    InvalidInput,
    InvalidPositions,
)
from streamtap.harvest.asked import HarvestAsk
from streamtap.harvest.plan import read_prompts
from streamtap.harvest.run import run_harvest
from streamtap.harvest.standing import Progress
from streamtap.harvested.folder_place import FolderPlace
from streamtap.harvested.manifest import HarvestManifest
from streamtap.pooling import pool
from streamtap.spec import Projection
from streamtap.testing.characters import BOS
from streamtap.testing.fake_engine import FakeEngine

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
PROMPTS = [f"prompt {i} {'x' * (i * 7 % 23)}" for i in range(23)]


def harvest(
    folder: Path,
    ask: HarvestAsk | None = None,
    *,
    engine: FakeEngine | None = None,
    prompts: Sequence[Any] = PROMPTS,
    place: FolderPlace | None = None,
    **more: Any,
) -> HarvestManifest:
    ask = ask or HarvestAsk(layers=[1, 3], shard_size=8)
    engine = engine or FakeEngine()
    tokens = read_prompts(prompts, engine.tokenizer, add_special_tokens=ask.add_special_tokens)
    return run_harvest(engine, tokens, place or FolderPlace(folder), ask, spool=folder / ".spool", **more)


def tensors(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for file in sorted(folder.glob("shard_*.safetensors")):
        held = load_file(file)
        assert not set(held) & set(found)
        found |= held
    return found


def test_rows_are_those_of_the_engine(tmp_path: Path) -> None:
    engine = FakeEngine()
    manifest = harvest(tmp_path, engine=engine)

    held = tensors(tmp_path)
    assert set(held) == {f"{kind}_{i}" for kind in ("prompt", "tokens") for i in range(len(PROMPTS))}
    for i, text in enumerate(PROMPTS):
        ids = engine.tokenizer.read(text, i)
        assert held[f"tokens_{i}"].dtype == np.int32
        assert np.array_equal(held[f"tokens_{i}"], ids)
        expected = np.stack([engine.rows(ids, layer) for layer in (1, 3)]).astype(BFLOAT16)
        assert held[f"prompt_{i}"].dtype == BFLOAT16
        assert np.array_equal(held[f"prompt_{i}"], expected)
    assert len(engine.runs) == len(PROMPTS)
    assert [shard.key for shard in manifest.shards] == [f"shard_{n:05d}.safetensors" for n in range(3)]
    assert not list(tmp_path.glob("whole_*"))
    assert [file.name for file in (tmp_path / ".spool").iterdir()] == ["lock"]


def test_the_manifest_says_what_the_contract_asks(tmp_path: Path) -> None:
    harvest(tmp_path, run_id="run-1")

    said = json.loads((tmp_path / "manifest.json").read_text())
    assert {
        "run_id", "layout_version", "model_id", "hf_repo", "revision", "dtype", "compression", "capture",
        "add_special_tokens", "layer_indices", "residual_stream_convention", "n_prompts", "contents", "projection",
        "tensor_layout", "tokens_layout", "statistics", "mean_token_norm", "truncated_prompts", "shards",
    } <= set(said)  # fmt: skip
    assert (said["run_id"], said["layout_version"], said["contents"], said["projection"]) == (
        "run-1", 2, "activations", None,
    )  # fmt: skip
    assert (said["n_prompts"], said["layer_indices"], said["dtype"]) == (23, [1, 3], "bfloat16")
    for shard in said["shards"]:
        path = tmp_path / shard["key"]
        with safe_open(path, "np") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        assert {tensor["name"]: tensor["shape"] for tensor in shard["tensors"]} == shapes
        assert shard["bytes"] == path.stat().st_size
        assert {f"prompt_{i}" for i in shard["prompt_indices"]} <= set(shapes)
    assert [i for shard in said["shards"] for i in shard["prompt_indices"]] == list(range(23))


@pytest.mark.parametrize("positions", ["all", "last", "-3:", [0, 2, -1]])
@pytest.mark.parametrize("pooling", ["none", "last_token", "first_token", "mean", "max"])
def test_positions_and_pooling_choose_rows(tmp_path: Path, positions: Any, pooling: Any) -> None:
    engine = FakeEngine()
    harvest(tmp_path, HarvestAsk(layers=[2], positions=positions, pooling=pooling, dtype="float32"), engine=engine)

    held = tensors(tmp_path)
    for i, text in enumerate(PROMPTS):
        ids = engine.tokenizer.read(text, i)
        chosen = {"all": range(len(ids)), "last": [len(ids) - 1], "-3:": range(len(ids) - 3, len(ids))}.get(
            str(positions), [0, 2, len(ids) - 1]
        )
        rows = engine.rows(ids, 2)[list(chosen)]
        expected = rows if pooling == "none" else pool(rows, np.array([0, len(rows)]), pooling)
        assert np.array_equal(held[f"prompt_{i}"], expected[None])
        one = {"last_token": [-1], "first_token": [0]}.get(pooling)
        if one is not None or (pooling == "none" and positions != "all"):
            assert held[f"positions_{i}"].tolist() == [list(chosen)[j] for j in one or range(len(rows))]
        else:
            assert f"positions_{i}" not in held


def test_projections_are_products_with_unit_directions(tmp_path: Path) -> None:
    engine = FakeEngine()
    directions = np.random.default_rng(0).normal(size=(3, engine.hidden)) * [[1e-3], [1], [1e3]]
    ask = HarvestAsk(layers=[0, 2], projection=Projection.onto(directions))
    manifest = harvest(tmp_path, ask, engine=engine)

    unit = directions / np.linalg.norm(directions, axis=1, keepdims=True)
    held = tensors(tmp_path)
    for i, text in enumerate(PROMPTS):
        ids = engine.tokenizer.read(text, i)
        expected = np.stack([engine.rows(ids, layer).astype(np.float64) @ unit.T for layer in (0, 2)])
        assert held[f"prompt_{i}"].dtype == np.float32
        assert np.allclose(held[f"prompt_{i}"], expected, rtol=1e-5, atol=1e-6)
    assert (manifest.contents, manifest.dtype) == ("projections", "float32")
    assert manifest.projection is not None
    assert manifest.projection["directions"] == 3
    with pytest.raises(InvalidInput, match=r"directions are 5 wide; rows of fake are 8"):
        harvest(tmp_path / "other", HarvestAsk(projection=Projection.onto(np.ones((1, 5)))))
    assert not (tmp_path / "other" / "run.json").exists()


def test_a_prompt_longer_than_the_context_is_cut_and_said(tmp_path: Path) -> None:
    manifest = harvest(tmp_path, prompts=["short", "x" * 100, "y" * 63], engine=FakeEngine(context_tokens=64))

    assert list(manifest.truncated_prompts) == [{"index": 1, "tokens": 101, "kept": 64}]
    assert tensors(tmp_path)["prompt_1"].shape == (2, 64, 8)


def test_text_with_its_own_bos_has_two_unless_none_is_added(tmp_path: Path) -> None:
    """The tokenizer adds one; token ids are as they are, as chats are."""
    ids = [BOS, 20, 21]
    double = harvest(tmp_path / "text", HarvestAsk(layers=[1]), prompts=["ab"])
    harvest(tmp_path / "bare", HarvestAsk(layers=[1], add_special_tokens=False), prompts=["ab", ids])

    assert double.add_special_tokens is True
    assert tensors(tmp_path / "text")["tokens_0"].tolist()[0] == BOS
    bare = tensors(tmp_path / "bare")
    assert BOS not in bare["tokens_0"].tolist()
    assert bare["tokens_1"].tolist() == ids


def test_the_manifest_is_written_last(tmp_path: Path) -> None:
    written: list[str] = []

    class Watched(FolderPlace):
        def put(self, name: str, data: bytes) -> None:
            written.append(name)
            super().put(name, data)

        def put_file(self, name: str, file: Path, *, sha256: str) -> None:
            super().put_file(name, file, sha256=sha256)
            written.append(name)

    harvest(tmp_path, place=Watched(tmp_path))

    assert written[0] == "run.json"
    assert written[-2:] == ["stats.safetensors", "manifest.json"]
    for number in range(3):
        assert written.index(f"shard_{number:05d}.safetensors") < written.index(f"whole_{number:05d}.safetensors")


@pytest.mark.parametrize("batch_size", [None, 1, 3, 64])
def test_rows_do_not_depend_on_the_batch(tmp_path: Path, batch_size: int | None) -> None:
    harvest(tmp_path / "a", HarvestAsk(layers=[1], batch_size=batch_size, shard_size=5))
    harvest(tmp_path / "b", HarvestAsk(layers=[1], shard_size=23))

    one, other = tensors(tmp_path / "a"), tensors(tmp_path / "b")
    assert set(one) == set(other)
    assert all(np.array_equal(one[name], other[name]) for name in one)


def test_equal_prompts_each_have_their_rows(tmp_path: Path) -> None:
    harvest(tmp_path, prompts=["same"] * 9 + ["other"] * 9)

    held = tensors(tmp_path)
    assert len([name for name in held if name.startswith("prompt_")]) == 18
    assert np.array_equal(held["prompt_0"], held["prompt_8"])
    assert not np.array_equal(held["prompt_0"], held["prompt_17"])


def test_what_is_whole_is_not_run_again(tmp_path: Path) -> None:
    engine, seen = FakeEngine(), list[Progress]()
    told = iter([False] * 3)

    with pytest.raises(HarvestFailed, match="goes on from the shards that are whole"):
        harvest(tmp_path, engine=engine, should_stop=lambda: next(told, True))
    first = len(engine.runs)
    manifest = harvest(tmp_path, engine=engine, on_progress=seen.append)
    again = harvest(tmp_path, engine=engine)

    assert 0 < first < len(PROMPTS)
    assert len(engine.runs) <= len(PROMPTS) + 8
    assert (seen[-1].shards_done, seen[-1].prompts_done) == (3, 23)
    assert 0 < seen[-1].tokens_found < seen[-1].tokens_done
    assert again == manifest
    assert set(tensors(tmp_path)) == {f"{kind}_{i}" for kind in ("prompt", "tokens") for i in range(23)}


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    manifest = harvest(tmp_path, run_id="first")
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}
    engine = FakeEngine()

    assert harvest(tmp_path, engine=engine) == manifest
    assert engine.runs == []
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()} == before


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("prompts", [[*PROMPTS[:-1], "another"], [PROMPTS[1], PROMPTS[0], *PROMPTS[2:]]])
def test_other_prompts_are_refused(tmp_path: Path, prompts: list[str], whole: bool) -> None:
    more = [] if whole else PROMPTS
    calls = iter(range(100))
    try:
        harvest(tmp_path, prompts=[*PROMPTS, *more], should_stop=lambda: next(calls) > 8)
    except HarvestFailed:
        assert not whole
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()}
    engine = FakeEngine()

    with pytest.raises(HarvestMismatch, match=r"holds a run of other prompts"):
        harvest(tmp_path, prompts=[*prompts, *more], engine=engine)
    assert engine.runs == []
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir() if file.is_file()} == before


@pytest.mark.parametrize(
    ("ask", "engine", "differs"),
    [
        (HarvestAsk(layers=[1], shard_size=8), FakeEngine(), r"with layers \[1, 3\], and this one has \[1\]"),
        (HarvestAsk(layers=[1, 3], shard_size=4), FakeEngine(), r"with shard_size 8, and this one has 4"),
        (HarvestAsk(layers=[1, 3], shard_size=8, pooling="mean"), FakeEngine(), r"pooling"),
        (HarvestAsk(layers=[1, 3], shard_size=8), FakeEngine(named={"commit": "other"}), r"with model"),
        (HarvestAsk(layers=[1, 3], shard_size=8, compression="zstd"), FakeEngine(), r"compression"),
    ],
)
def test_another_run_is_refused_and_says_what_differs(
    tmp_path: Path, ask: HarvestAsk, engine: FakeEngine, differs: str
) -> None:
    harvest(tmp_path, run_id="mine")

    with pytest.raises(HarvestMismatch, match=differs):
        harvest(tmp_path, ask, engine=engine)
    with pytest.raises(HarvestMismatch, match=r"holds run mine, not yours"):
        harvest(tmp_path, run_id="yours")
    assert engine.runs == []


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    refused: list[BaseException] = []

    def second(_batch: int) -> None:
        try:
            harvest(tmp_path)
        except HarvestMismatch as error:
            refused.append(error)

    harvest(tmp_path, engine=FakeEngine(before_batch=second))

    assert {str(error).split(";")[0] for error in refused} == {f"another process harvests with {tmp_path / '.spool'}"}


def test_what_could_not_begin_may_be_asked_otherwise(tmp_path: Path) -> None:
    with pytest.raises(InvalidPositions, match=r"prompt 0: position 40 is outside"):
        harvest(tmp_path, HarvestAsk(layers=[1], positions=[40]))
    with pytest.raises(InvalidInput, match="nothing to harvest"):
        harvest(tmp_path, HarvestAsk(layers=[1]), prompts=[])

    assert harvest(tmp_path, HarvestAsk(layers=[2])).layer_indices == (2,)


def test_a_bad_prompt_late_leaves_the_run_to_go_on(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="prompt 20 is an empty string"):
        harvest(tmp_path, prompts=[*PROMPTS[:20], ""])
    engine = FakeEngine()

    # Prompts are read several shards ahead, so that none is whole yet; nothing stands in the way.
    assert harvest(tmp_path, engine=engine).n_prompts == 23


@pytest.mark.parametrize("run_id", ["", "../up", "a/b", ".hidden", "x" * 101, "ä"])
def test_a_run_id_is_a_name(tmp_path: Path, run_id: str) -> None:
    with pytest.raises(InvalidInput, match="run_id must be letters"):
        harvest(tmp_path, run_id=run_id)


class Forgetful(FakeEngine):
    """Leaves out, or repeats, the last batch."""

    times = 0

    def capture(self, *args: Any, **named: Any) -> Any:
        parts = list(super().capture(*args, **named))
        yield from [*parts[:-1], *parts[-1:] * self.times]


@pytest.mark.parametrize("times", [0, 2])
def test_an_engine_that_leaves_out_or_repeats_is_found_out(tmp_path: Path, times: int) -> None:
    engine = Forgetful()
    engine.times = times

    with pytest.raises((CaptureMissed, InvalidInput), match=r"times from the engine|announced"):
        harvest(tmp_path, engine=engine)
    assert not (tmp_path / "manifest.json").exists()
    assert harvest(tmp_path).n_prompts == 23


def test_compressed_shards_hold_the_same(tmp_path: Path) -> None:
    import zstandard

    harvest(tmp_path / "plain", run_id="one")
    manifest = harvest(tmp_path / "packed", HarvestAsk(layers=[1, 3], shard_size=8, compression="zstd"), run_id="one")

    for shard in manifest.shards:
        packed = tmp_path / "packed" / shard.key
        plain = tmp_path / "plain" / shard.key.removesuffix(".zst")
        assert shard.key.endswith(".safetensors.zst")
        assert zstandard.ZstdDecompressor().decompress(packed.read_bytes()) == plain.read_bytes()
        assert shard.bytes == packed.stat().st_size
    assert manifest.compression == "zstd"


def test_no_thread_is_left(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    harvest(tmp_path)

    assert set(threading.enumerate()) <= before


class Given(FakeEngine):
    """A model that somebody made, and may have trained since."""

    weights = "sha256:1"

    def weights_hash(self) -> str:
        return self.weights


def test_a_model_without_a_commit_is_told_by_its_weights(tmp_path: Path) -> None:
    """Or a run would go on with other weights under the same name, and nobody would know."""
    engine = Given(named={"commit": IN_MEMORY})
    assert harvest(tmp_path, engine=engine).revision == "sha256:1"
    engine.weights = "sha256:2"

    with pytest.raises(HarvestMismatch, match="holds a run with model"):
        harvest(tmp_path, engine=engine)


@pytest.mark.parametrize("name", ["shard_00001.safetensors", "whole_00000.safetensors", "manifest.json"])
def test_files_of_a_run_that_nobody_knows_are_not_taken_for_its_own(tmp_path: Path, name: str) -> None:
    """A record says of which prompts it is, and not of which layers."""
    calls = iter(range(100))
    with pytest.raises(HarvestFailed):
        harvest(tmp_path, should_stop=lambda: next(calls) > 3)
    for file in tmp_path.iterdir():
        if file.is_file():
            file.unlink()
    (tmp_path / name).write_bytes(b"?")
    (tmp_path / "notes.txt").write_text("mine")

    with pytest.raises(HarvestMismatch, match=f"holds {name} and no run.json"):
        harvest(tmp_path, HarvestAsk(layers=[2]))
    assert not (tmp_path / "run.json").exists()
    (tmp_path / name).unlink()
    assert harvest(tmp_path, HarvestAsk(layers=[2])).layer_indices == (2,)
