"""Several runs that are brought to a folder are the run that their prompts would have been."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamtap.errors import HarvestDamaged, HarvestMismatch
from streamtap.harvest.plan import Tokenised
from streamtap.harvested.folder_place import FolderPlace
from streamtap.harvested.joining import fetch_joined
from streamtap.harvested.reader import HarvestedRun
from streamtap.harvested.segments import Segments

Make = Callable[..., Any]
CUTS = (0, 4, 8, 11)


@pytest.fixture(scope="module", params=[{}, {"compression": "zstd"}, {"positions": [-1]}, {"pooling": "mean"}], ids=str)
def runs(request: pytest.FixtureRequest, make_run: Make) -> tuple[Any, list[Any]]:
    """One run of all prompts, in files of four, and runs of four, four and three of them."""
    whole = make_run(**request.param)
    return whole, [make_run(prompts=whole.prompts[a:b], **request.param) for a, b in pairwise(CUTS)]


def places(parts: list[Any]) -> list[FolderPlace]:
    return [FolderPlace(part.folder) for part in parts]


def test_the_files_are_those_of_one_run(runs: tuple[Any, list[Any]], tmp_path: Path) -> None:
    whole, parts = runs
    told: list[tuple[int, int]] = []

    manifest = fetch_joined(places(parts), tmp_path, on_bytes=lambda *counts: told.append(counts))

    names = {path.name for path in tmp_path.iterdir()}
    assert names == {path.name for path in whole.folder.iterdir()} - {"run.json"}
    for name in names - {"manifest.json", "stats.safetensors"}:
        assert (tmp_path / name).read_bytes() == (whole.folder / name).read_bytes()
    expected = json.loads((whole.folder / "manifest.json").read_text())
    found = json.loads((tmp_path / "manifest.json").read_text())
    for differing in ("run_id", "mean_token_norm"):
        expected.pop(differing), found.pop(differing)
    assert found == expected
    one = HarvestedRun.open(whole.folder)
    np.testing.assert_allclose(manifest.mean_token_norm, one.manifest.mean_token_norm, rtol=1e-9)
    run = HarvestedRun.open(tmp_path)
    for name in ("mean", "std"):
        np.testing.assert_allclose(run.statistics()[name], one.statistics()[name], rtol=1e-5, atol=1e-6)
    run.verify()
    assert (
        told[-1][0] == told[-1][1] == sum(e.bytes for p in parts for e in HarvestedRun.open(p.folder).manifest.shards)
    )


def test_windows_and_cut_prompts_keep_their_numbers(make_run: Make, tmp_path: Path) -> None:
    def window(i: int) -> Tokenised:
        segments = Segments(np.array([i, i + 1]), np.array([0, 5]), np.array([0, 3], np.int32))
        return Tokenised(np.arange(4 + i, dtype=np.int32), 100 + i, segments)

    parts = [make_run(prompts=[window(i) for i in numbers]) for numbers in ((0, 1, 2), (3, 4))]
    fetch_joined(places(parts), tmp_path)

    run = HarvestedRun.open(tmp_path)
    assert [dict(each) for each in run.manifest.truncated_prompts] == [
        {"index": i, "tokens": 100 + i, "kept": 4 + i} for i in range(5)
    ]
    for i in range(5):
        segments = run.segments(i)
        assert segments is not None
        assert segments.documents.tolist() == [i, i + 1]


def test_what_broke_off_goes_on(runs: tuple[Any, list[Any]], counted: Make, tmp_path: Path) -> None:
    _, parts = runs
    far = [counted(part.folder) for part in parts]
    (lost,) = parts[2].folder.glob("shard_00000*")
    raw = lost.read_bytes()
    lost.unlink()
    with pytest.raises(HarvestDamaged, match=rf"{lost.name} of s3://far/away is missing"):
        fetch_joined(far, tmp_path)
    assert not (tmp_path / "manifest.json").exists()

    lost.write_bytes(raw)
    here = list(tmp_path.glob("shard_*"))
    for place in far:
        place.asked.clear()
    fetch_joined(far, tmp_path)
    fetched = sum(bool([1 for name, *_ in place.asked if name.startswith("shard_")]) for place in far)
    assert fetched == 3 - len(here)
    HarvestedRun.open(tmp_path).verify()


def test_a_second_time_brings_only_what_was_lost(runs: tuple[Any, list[Any]], counted: Make, tmp_path: Path) -> None:
    _, parts = runs
    far = [counted(part.folder) for part in parts]
    first = fetch_joined(far, tmp_path)
    for place in far:
        place.asked.clear()

    assert fetch_joined(far, tmp_path) == first
    assert [place.bytes_of("") for place in far] == [
        sum((part.folder / name).stat().st_size for name in ("manifest.json", "stats.safetensors")) for part in parts
    ]
    (spoilt,) = tmp_path.glob("shard_00001*")
    spoilt.write_bytes(bytes(spoilt.stat().st_size))
    fetch_joined(far, tmp_path)
    HarvestedRun.open(tmp_path).verify()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_another_run_in_the_folder_stays(runs: tuple[Any, list[Any]], tmp_path: Path) -> None:
    whole, parts = runs

    with pytest.raises(HarvestMismatch, match="name another folder"):
        fetch_joined(places(parts), whole.folder)
    HarvestedRun.open(whole.folder).verify()


def test_parts_of_another_kind_are_refused(make_run: Make, tmp_path: Path) -> None:
    parts = [make_run(n_prompts=2), make_run(n_prompts=2, pooling="mean")]

    with pytest.raises(HarvestMismatch, match="capture differs"):
        fetch_joined(places(parts), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_header_that_means_nothing_is_refused(make_run: Make, tmp_path: Path) -> None:
    part = make_run(n_prompts=2)
    shard, manifest = part.folder / "shard_00000.safetensors", part.folder / "manifest.json"
    shard.write_bytes(b"x" * shard.stat().st_size)
    told = json.loads(manifest.read_text())
    told["shards"][0]["sha256"] = hashlib.sha256(shard.read_bytes()).hexdigest()
    manifest.write_text(json.dumps(told))

    with pytest.raises(HarvestDamaged, match="header that means nothing"):
        fetch_joined(places([part, make_run(n_prompts=2)]), tmp_path)
    assert list(tmp_path.glob("*.numbered")) == []
