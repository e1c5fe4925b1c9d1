"""V27: nothing is dropped, whatever stage is slow; and of a run that was killed, what is missing is known exactly."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamtap.errors import HarvestDamaged, HarvestMismatch
from streamtap.harvest.missing import missing_prompts
from streamtap.harvest.shard_writing import ShardWriting
from streamtap.harvested.folder_place import FolderPlace
from streamtap.harvested.reader import HarvestedRun
from streamtap.testing.fake_engine import FakeEngine

N_PROMPTS, SHARD = 30, 4
PROMPTS = [f"prompt {i} {'x' * (i * 37 % 101)}" for i in range(N_PROMPTS)]
Harvest = Callable[..., HarvestedRun]


_KILLED = """
import os, signal, sys
from pathlib import Path
from streamtap.harvest.local import harvest_prompts
from streamtap.testing.fake_engine import FakeEngine

def before(batch):
    if batch == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)

harvest_prompts(
    sys.argv[3:], out=sys.argv[1], engine=FakeEngine(before_batch=before), layers=[1, 3], shard_size=4, batch_size=1,
    dtype="float32",
)
"""


def test_v27_of_a_run_that_was_killed_the_missing_prompts_are_named(harvest: Harvest, tmp_path: Path) -> None:
    command = [sys.executable, "-c", _KILLED, str(tmp_path), str(3 * SHARD + 2), *PROMPTS]
    assert subprocess.run(command, timeout=60, check=False).returncode == -signal.SIGKILL
    place = FolderPlace(tmp_path)
    n_whole = len(list(tmp_path.glob("whole_*")))

    missing = missing_prompts(place, N_PROMPTS).tolist()
    engine = FakeEngine()
    harvest(tmp_path, PROMPTS, engine, shard_size=SHARD, batch_size=1)

    assert 0 < n_whole < 8
    assert missing == list(range(n_whole * SHARD, N_PROMPTS))
    # Some of them lay in the spool; no other ran.
    assert len(engine.runs) <= len(missing)
    assert missing_prompts(place, N_PROMPTS).tolist() == []


def test_a_shard_whose_file_is_gone_is_missing(harvest: Harvest, tmp_path: Path) -> None:
    harvest(tmp_path, PROMPTS, shard_size=SHARD)
    (tmp_path / "shard_00002.safetensors").unlink()

    assert missing_prompts(FolderPlace(tmp_path), N_PROMPTS).tolist() == [8, 9, 10, 11]
    assert missing_prompts(FolderPlace(tmp_path / "none"), 3).tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", ["shard_00001.safetensors", "stats.safetensors"])
def test_a_finished_run_that_lost_a_file_is_not_called_whole(harvest: Harvest, tmp_path: Path, name: str) -> None:
    harvest(tmp_path)
    before = (tmp_path / name).read_bytes()
    (tmp_path / name).unlink()

    with pytest.raises(HarvestDamaged, match=rf"lacks {name}, which its manifest.json names; remove manifest.json"):
        harvest(tmp_path)
    (tmp_path / "manifest.json").unlink()
    harvest(tmp_path)

    assert (tmp_path / name).read_bytes() == before


def test_fewer_prompts_do_not_make_an_unfinished_run_whole(harvest: Harvest, tmp_path: Path) -> None:
    def fails_late(batch: int) -> None:
        if batch == 6 * SHARD + 1:
            raise OSError("unplugged")

    with pytest.raises(OSError, match="unplugged"):
        harvest(tmp_path, PROMPTS, FakeEngine(before_batch=fails_late), shard_size=SHARD, batch_size=1)
    whole = sorted(file.name for file in tmp_path.glob("whole_*"))
    assert len(whole) > 3

    with pytest.raises(HarvestMismatch, match="a run of other prompts: they differ from prompt 8 on, or in their num"):
        harvest(tmp_path, PROMPTS[:8], shard_size=SHARD, batch_size=1)

    assert sorted(file.name for file in tmp_path.glob("whole_*")) == whole
    engine = FakeEngine()
    assert len(harvest(tmp_path, PROMPTS, engine, shard_size=SHARD, batch_size=1)) == N_PROMPTS
    assert len(engine.runs) <= N_PROMPTS - SHARD * len(whole)


def test_v27_a_slow_writer_drops_nothing(harvest: Harvest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add = ShardWriting.add

    def slow(self: ShardWriting, part: Any) -> None:
        time.sleep(0.01)  # a batch of the fake engine takes a tenth of it
        add(self, part)

    quick = harvest(tmp_path / "quick", PROMPTS, shard_size=SHARD, batch_size=1)
    monkeypatch.setattr(ShardWriting, "add", slow)
    run = harvest(tmp_path / "slow", PROMPTS, shard_size=SHARD, batch_size=1)

    assert missing_prompts(FolderPlace(tmp_path / "slow"), N_PROMPTS).tolist() == []
    assert [entry.sha256 for entry in run.manifest.shards] == [entry.sha256 for entry in quick.manifest.shards]


@pytest.mark.parametrize(
    ("prompts", "first"), [(["other", *PROMPTS[1:]], 0), ([*PROMPTS[:-1], "other"], 28), (PROMPTS[:6], 4)]
)
def test_a_whole_run_says_from_where_on_prompts_differ(
    harvest: Harvest, tmp_path: Path, prompts: list[str], first: int
) -> None:
    harvest(tmp_path, PROMPTS, shard_size=SHARD)

    with pytest.raises(HarvestMismatch, match=f"differ from prompt {first} on"):
        harvest(tmp_path, prompts, shard_size=SHARD)
