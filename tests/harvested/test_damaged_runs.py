"""A run that was damaged says so, in one sentence that names the file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamtap.codec import compress_file
from streamtap.errors import HarvestDamaged, InvalidLayers
from streamtap.harvested.manifest import read_manifest
from streamtap.harvested.reader import HarvestedRun
from streamtap.tensor_file import read_tensors, tensor_bytes

Make = Callable[..., Any]
SHARD = "shard_00001.safetensors"


@pytest.fixture(scope="module")
def originals(make_run: Make) -> dict[str, Path]:
    return {"none": make_run().folder, "zstd": make_run(compression="zstd").folder}


@pytest.fixture(params=["near", "far"])
def opened(request: pytest.FixtureRequest, counted: Make) -> Callable[[Path], HarvestedRun]:
    return lambda folder: HarvestedRun.open(folder if request.param == "near" else counted(folder))


@pytest.fixture
def folder(originals: dict[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(originals["none"], tmp_path / "run")


@pytest.fixture
def packed(originals: dict[str, Path], tmp_path: Path) -> Path:
    return shutil.copytree(originals["zstd"], tmp_path / "packed")


def _edit(file: Path, change: Callable[[bytes], bytes]) -> None:
    file.write_bytes(change(file.read_bytes()))


def _flip(raw: bytes, at: int) -> bytes:
    return raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]


def _say(folder: Path, **changed: Any) -> None:
    said = json.loads((folder / "manifest.json").read_bytes())
    (folder / "manifest.json").write_text(json.dumps(said | changed))


def _say_of_shard(folder: Path, **changed: Any) -> None:
    said = json.loads((folder / "manifest.json").read_bytes())
    said["shards"][1] |= changed
    (folder / "manifest.json").write_text(json.dumps(said))


def test_a_file_that_is_missing(folder: Path, opened: Make) -> None:
    (folder / SHARD).unlink()
    run = opened(folder)

    assert run.prompt(0)[2].shape[1] == 5
    for ask in (lambda: run.prompt(5), lambda: run.token_ids(5), lambda: run.activations(), run.verify):
        with pytest.raises(HarvestDamaged, match=f"^{SHARD} of .* is missing"):
            ask()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("change", [lambda raw: raw[:-1], lambda raw: raw + b"x", lambda raw: b""])
def test_a_file_of_another_size(folder: Path, opened: Make, change: Callable[[bytes], bytes]) -> None:
    _edit(folder / SHARD, change)

    for ask in (opened(folder).verify, lambda: opened(folder).prompt(5)):
        with pytest.raises(HarvestDamaged, match=f"^{SHARD} of .* has (more|[0-9]+) bytes, and the manifest says"):
            ask()


@pytest.mark.parametrize("block_bytes", [1 << 23, 100, 1])
@pytest.mark.parametrize("change", [lambda raw: raw[:-1], lambda raw: raw + b"x"], ids=["shorter", "longer"])
def test_a_large_file_far_away_of_another_size(
    folder: Path, counted: Make, monkeypatch: pytest.MonkeyPatch, change: Callable[[bytes], bytes], block_bytes: int
) -> None:
    monkeypatch.setattr("streamtap.harvested.file_bytes._SMALL_BYTES", 0)
    monkeypatch.setattr("streamtap.harvested.verify._BLOCK_BYTES", block_bytes)
    HarvestedRun.open(counted(folder)).verify()
    _edit(folder / SHARD, change)

    with pytest.raises(HarvestDamaged, match=f"^{SHARD} of .* has (more|[0-9]+) bytes, and the manifest says"):
        HarvestedRun.open(counted(folder)).verify()


@pytest.mark.parametrize("place", [100, -100])
def test_one_bit_is_found_by_verify(folder: Path, opened: Make, place: int) -> None:
    _edit(folder / SHARD, lambda raw: _flip(raw, place % len(raw)))

    with pytest.raises(HarvestDamaged, match=f"^{SHARD} of .* has another content"):
        opened(folder).verify()


def test_a_header_that_means_nothing(folder: Path, opened: Make) -> None:
    _edit(folder / SHARD, lambda raw: raw[:8] + b"[" + raw[9:])
    with pytest.raises(HarvestDamaged, match=f"header of {SHARD}"):
        opened(folder).prompt(5)
    _edit(folder / SHARD, lambda raw: b"\xff" * 8 + raw[8:])
    with pytest.raises(HarvestDamaged, match=f"{SHARD} of .* is not a safetensors file"):
        opened(folder).prompt(5)


@pytest.mark.parametrize("kind", ["gone", "shape", "dtype"])
def test_a_header_that_does_not_fit_the_manifest(folder: Path, opened: Make, kind: str) -> None:
    tensors = dict(read_tensors((folder / SHARD).read_bytes(), SHARD)[0])
    rows = tensors.pop("prompt_5")
    if kind != "gone":
        tensors["prompt_5"] = rows[:, :, :4] if kind == "shape" else rows.astype(np.float16)
    raw = tensor_bytes(tensors)
    (folder / SHARD).write_bytes(raw)
    _say_of_shard(folder, bytes=len(raw))
    run = opened(folder)

    assert run.prompt(4)[2].shape[1] == 5
    with pytest.raises(HarvestDamaged, match=f"{SHARD} of .* is damaged: prompt_5 .* the manifest says"):
        run.prompt(5)
    with pytest.raises(HarvestDamaged, match="prompt_5|another content"):
        run.verify()


def test_a_packed_file_that_cannot_be_unpacked(packed: Path, opened: Make) -> None:
    name = f"{SHARD}.zst"
    _edit(packed / name, lambda raw: b"no zstd" + raw[7:])

    with pytest.raises(HarvestDamaged, match=f"^{name} of .* cannot be unpacked"):
        opened(packed).prompt(5)


def test_a_packed_file_that_says_it_is_huge(packed: Path, opened: Make, tmp_path: Path) -> None:
    name = f"{SHARD}.zst"
    with (tmp_path / "zeros").open("wb") as file:
        file.truncate(200_000_000)
    compress_file(tmp_path / "zeros", packed / name)
    _say_of_shard(packed, bytes=(packed / name).stat().st_size)

    with pytest.raises(HarvestDamaged, match=f"^{name} of .* cannot be unpacked"):
        opened(packed).prompt(5)


@pytest.mark.parametrize("change", [None, lambda raw: raw[:20], lambda raw: b"", lambda raw: tensor_bytes({})])
def test_statistics_that_are_damaged(folder: Path, opened: Make, change: Any) -> None:
    file = folder / "stats.safetensors"
    if change is None:
        file.unlink()
    else:
        _edit(file, change)
    run = opened(folder)

    for ask in (run.statistics, run.verify):
        with pytest.raises(HarvestDamaged, match=r"^stats.safetensors of .* (missing|does not hold)"):
            ask()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"layout_version": 3}, "layout_version 3; this version of Streamtap reads 2"),
        ({"n_prompts": 12}, "11 prompts in its shards and 12 in all"),
        ({"n_prompts": -1}, "not the manifest of a harvest"),
        ({"n_prompts": 10**30}, "not the manifest of a harvest"),
        ({"dtype": "int8"}, "dtype 'int8'"),
        ({"compression": "gzip"}, "compression 'gzip'"),
        ({"shards": []}, "0 prompts in its shards"),
        ({"shards": None}, "not the manifest of a harvest"),
        ({"layer_indices": ["a"]}, "not the manifest of a harvest"),
        ({"layer_indices": []}, r"names layers \[\], which do not ascend"),
        ({"layer_indices": [3, 2, 0]}, r"names layers \[3, 2, 0\], which do not ascend"),
        ({"capture": 3}, "not the manifest of a harvest"),
        ({"provenance": 3}, "not the manifest of a harvest"),
    ],
)
def test_a_manifest_that_contradicts_itself(folder: Path, opened: Make, changed: dict[str, Any], says: str) -> None:
    _say(folder, **changed)

    with pytest.raises(HarvestDamaged, match=says) as caught:
        opened(folder)
    assert "manifest.json" in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"key": ".."}, "damaged: a file of a run is named like"),
        ({"key": "x/.hidden"}, "damaged: a file of a run is named like"),
        ({"key": ""}, "damaged: a file of a run is named like"),
        ({"prompt_indices": [4, 5, 6, 6]}, "each has to be in one shard"),
        ({"prompt_indices": [4, 5, 6, True]}, "not the manifest of a harvest"),
        ({"bytes": "many"}, "not the manifest of a harvest"),
        ({"tensors": [{"name": "prompt_4"}]}, "not the manifest of a harvest"),
    ],
)
def test_a_shard_that_the_manifest_tells_wrong(folder: Path, opened: Make, changed: dict[str, Any], says: str) -> None:
    _say_of_shard(folder, **changed)

    with pytest.raises(HarvestDamaged, match=says):
        opened(folder)


def test_layers_that_are_not_those_of_the_tensors(folder: Path, opened: Make) -> None:
    _say(folder, layer_indices=[0, 2])
    run = opened(folder)

    for ask in (run.prompt, run.positions):
        with pytest.raises(HarvestDamaged, match=r"prompt_5 is \[3, \d+, 5\] by the manifest.*\[2, rows, 5\]"):
            ask(5)
    with pytest.raises(HarvestDamaged, match=r"prompt_0 is \[3, \d+, 5\] by the manifest"):
        run.verify()


def test_a_shard_whose_tensors_the_manifest_does_not_tell(folder: Path, opened: Make) -> None:
    _say_of_shard(folder, tensors=[{"name": "prompt_4", "shape": [15]}])
    run = opened(folder)

    with pytest.raises(HarvestDamaged, match=r"prompt_4 is \[15\] by the manifest, and has to be \[3, rows, 5\]"):
        run.prompt(4)
    with pytest.raises(HarvestDamaged, match="the manifest names no tokens_4"):
        run.token_ids(4)
    with pytest.raises(HarvestDamaged, match="prompt_4"):
        run.activations()
    with pytest.raises(HarvestDamaged, match="tells no shape of prompt_5"):
        run.prompt(5)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"3", b"{}", b"[" * 100_000, b"\xff"], ids=range(7))
def test_bytes_that_are_no_manifest(raw: bytes) -> None:
    with pytest.raises(HarvestDamaged, match=r"^x/manifest.json is not the manifest of a harvest \(\w+\)\.$"):
        read_manifest(raw, "x/manifest.json")


def test_a_manifest_comes_back_as_it_was_written(originals: dict[str, Path]) -> None:
    raw = (originals["none"] / "manifest.json").read_bytes()

    assert read_manifest(raw, "x").to_json() == raw


def _read_all(folder: Path) -> None:
    run = HarvestedRun.open(folder)
    run.activations()
    run.statistics()
    run.segments(5)
    run.prompt(5, -1)


def test_whatever_a_header_says_is_one_sentence(folder: Path) -> None:
    raw = (folder / SHARD).read_bytes()
    random, refused = np.random.default_rng(0), 0
    for at in range(8 + int.from_bytes(raw[:8], "little")):
        (folder / SHARD).write_bytes(raw[:at] + bytes([random.integers(256)]) + raw[at + 1 :])
        try:
            _read_all(folder)
        except HarvestDamaged:
            refused += 1

    assert refused > 100


ODD_VALUES: list[Any] = [None, True, 3, -1, 1.5, 10**40, "x", "", [], [None], ["x"], [-1], [[1]], {}, {"x": 1}]


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where in a JSON value something stands that may be replaced; of a list, its first and last."""
    pairs = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else [])
    if isinstance(value, list) and len(pairs) > 2:
        pairs = [pairs[0], pairs[-1]]
    return [found for key, each in pairs for found in [(*path, key), *_paths(each, (*path, key))]]


def test_whatever_a_manifest_says_is_one_sentence(folder: Path) -> None:
    file, refused = folder / "manifest.json", 0
    raw = file.read_bytes()
    for path in _paths(json.loads(raw)):
        for odd in ODD_VALUES:
            said = json.loads(raw)
            inner = said
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = odd
            file.write_text(json.dumps(said))
            try:
                _read_all(folder)
            except (HarvestDamaged, InvalidLayers):
                refused += 1

    assert refused > 500
