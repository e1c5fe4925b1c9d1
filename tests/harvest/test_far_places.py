"""A store that is far away: what it is asked in great number, it is asked side by side."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from streamtap.errors import HarvestFailed
from streamtap.harvest.asked import HarvestAsk
from streamtap.harvest.plan import read_prompts
from streamtap.harvest.record import is_record
from streamtap.harvest.run import run_harvest
from streamtap.harvested.folder_place import FolderPlace
from streamtap.harvested.manifest import HarvestManifest
from streamtap.testing.fake_engine import FakeEngine

PROMPTS = [f"prompt {i}" for i in range(40)]


class FarPlace(FolderPlace):
    """Counts how many reads, and how many removals, of records are under way at once."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.read: list[str] = []
        self.most = {"get": 0, "delete": 0}
        self._now = {"get": 0, "delete": 0}
        self._counting = threading.Lock()

    def get(self, name: str) -> bytes:
        if is_record(name):
            self.read.append(name)
            self._takes_its_time("get")
        return super().get(name)

    def delete(self, name: str) -> None:
        self._takes_its_time("delete")
        super().delete(name)

    def _takes_its_time(self, what: str) -> None:
        with self._counting:
            self._now[what] += 1
            self.most[what] = max(self.most[what], self._now[what])
        time.sleep(0.02)
        with self._counting:
            self._now[what] -= 1


def harvest(place: FolderPlace, engine: FakeEngine, stop_after: int = 1000) -> HarvestManifest:
    asked = iter(range(10_000))
    return run_harvest(
        engine,
        read_prompts(PROMPTS, engine.tokenizer),
        place,
        HarvestAsk(layers=[1], shard_size=1),
        spool=place.folder / ".spool",
        should_stop=lambda: next(asked) >= stop_after,
    )


def test_a_run_that_goes_on_reads_a_few_records_at_once(tmp_path: Path) -> None:
    whole = harvest(FolderPlace(tmp_path / "whole"), FakeEngine())
    with pytest.raises(HarvestFailed):
        harvest(FolderPlace(tmp_path / "run"), FakeEngine(), stop_after=30)
    place, engine = FarPlace(tmp_path / "run"), FakeEngine()

    manifest = harvest(place, engine)

    assert manifest.shards == whole.shards
    assert 25 < len(place.read) <= 30
    assert len(engine.runs) <= 40 - len(place.read)
    assert 2 < place.most["get"] <= 8


def test_a_hole_in_a_run_is_filled_and_the_shards_behind_it_are_found(tmp_path: Path) -> None:
    whole = harvest(FolderPlace(tmp_path / "whole"), FakeEngine())
    with pytest.raises(HarvestFailed):
        harvest(FolderPlace(tmp_path / "run"), FakeEngine(), stop_after=30)
    for number in (3, 4, 11):
        (tmp_path / "run" / f"whole_{number:05d}.safetensors").unlink()
    place, engine = FarPlace(tmp_path / "run"), FakeEngine()

    assert harvest(place, engine).shards == whole.shards
    assert len(place.read) + len(engine.runs) <= 40
    assert len(place.read) > 20


def test_records_are_removed_side_by_side(tmp_path: Path) -> None:
    place = FarPlace(tmp_path)
    harvest(place, FakeEngine())

    assert not any(is_record(name) for name in place.names())
    assert place.most["delete"] > 2
