from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from streamtap.errors import HarvestFailed, InvalidInput, TransferFailed
from streamtap.harvest.asked import HarvestAsk
from streamtap.harvest.node_engine import NodeEngine
from streamtap.harvest.plan import ShardPlan, Tokenised, plan_shards
from streamtap.harvest.standing import RunStanding, nobody
from streamtap.harvested.folder_place import FolderPlace
from streamtap.harvested.opening import open_place
from streamtap.harvested.places import WritablePlace
from streamtap.testing.fake_engine import FakeEngine

ASK = HarvestAsk(layers=[1, 2], shard_size=3)


@dataclass
class _Source:
    before_batch: Callable[[int], None] | None = None
    opened: list[FakeEngine] = field(default_factory=list)

    def open(self) -> FakeEngine:
        self.opened.append(FakeEngine(before_batch=self.before_batch))
        return self.opened[-1]


def _plans(n_prompts: int) -> list[ShardPlan]:
    prompts = [Tokenised(np.arange(4, 6 + i % 7, dtype=np.int32)) for i in range(n_prompts)]
    return list(plan_shards(prompts, ASK.shard_size))


def _begun(place: WritablePlace, run_id: str = "run-1") -> None:
    RunStanding(place, ASK, FakeEngine().provenance, run_id, nobody)


@pytest.fixture
def place(tmp_path: Path) -> FolderPlace:
    place = FolderPlace(tmp_path / "run")
    _begun(place)
    return place


@pytest.fixture
def engine(place: FolderPlace, tmp_path: Path) -> Iterator[NodeEngine]:
    engine = NodeEngine(_Source(), place.url, ASK, str(tmp_path / "spool"))
    engine.load()
    engine.join("run-1")
    yield engine
    engine.close()


def test_a_shard_lies_at_the_place_and_its_record_with_it(engine: NodeEngine, place: FolderPlace) -> None:
    record = engine.shard(_plans(3)[0])

    assert place.names() == {"run.json", "shard_00000.safetensors", "whole_00000.safetensors"}
    assert place.size(record.entry.key) == record.entry.bytes
    assert place.get("whole_00000.safetensors") == record.to_bytes()


def test_it_leaves_no_spool_and_closes_the_engine(place: FolderPlace, tmp_path: Path) -> None:
    source = _Source()
    engine = NodeEngine(source, place.url, ASK, str(tmp_path / "spool"))
    engine.load()
    engine.join("run-1")
    engine.shard(_plans(3)[0])

    engine.close()

    assert list((tmp_path / "spool").iterdir()) == []
    assert source.opened[0].closed


def test_beside_a_run_in_a_folder_a_shard_is_put_together_there(place: FolderPlace) -> None:
    engine = NodeEngine(_Source(), place.url, ASK)
    engine.load()
    engine.join("run-1")

    assert (place.folder / ".spool" / "streamtap-harvest-run-1" / "0").is_dir()
    engine.close()
    assert list((place.folder / ".spool").iterdir()) == []


def test_beside_a_run_in_an_object_store_it_is_among_the_temporary_files(
    s3_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    place = open_place(s3_url)
    _begun(place)
    engine = NodeEngine(_Source(), s3_url, ASK)
    engine.load()
    engine.join("run-1")
    assert (tmp_path / "streamtap-harvest-run-1" / "0").is_dir()

    record = engine.shard(_plans(3)[0])
    engine.close()

    assert place.names() == {"run.json", record.entry.key, "whole_00000.safetensors"}
    assert place.size(record.entry.key) == record.entry.bytes
    assert list(tmp_path.iterdir()) == []


def test_engines_on_one_machine_have_spools_of_their_own(place: FolderPlace, tmp_path: Path) -> None:
    engines = [NodeEngine(_Source(), place.url, ASK, str(tmp_path)) for _ in range(3)]
    for engine in engines:
        engine.load()
        engine.join("run-1")

    assert sorted(each.name for each in (tmp_path / "streamtap-harvest-run-1").iterdir()) == ["0", "1", "2"]
    for engine in engines:
        engine.close()
    assert not (tmp_path / "streamtap-harvest-run-1").exists()


def test_what_the_place_would_not_take_waits_in_the_spool_and_is_not_run_again(
    place: FolderPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, plan = _Source(), _plans(3)[0]
    engine = NodeEngine(source, place.url, ASK, str(tmp_path / "spool"))
    engine.load()
    engine.join("run-1")
    with monkeypatch.context() as patch:
        patch.setattr(FolderPlace, "put_file", _refusing)
        with pytest.raises(TransferFailed):
            engine.shard(plan)
    engine.close()
    ran = len(source.opened[0].runs)

    again = NodeEngine(source, place.url, ASK, str(tmp_path / "spool"))
    again.load()
    assert again.join("run-1") == {0}
    again.shard(plan)
    again.close()

    assert ran == 3
    assert source.opened[1].runs == []
    assert place.size("shard_00000.safetensors")
    assert list((tmp_path / "spool").iterdir()) == []


def _refusing(*_args: object, **_named: object) -> None:
    raise TransferFailed("the store is away")


def test_one_shard_is_uploaded_while_the_next_runs(
    place: FolderPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second_ran = threading.Event()
    put_file = FolderPlace.put_file

    def slow(self: FolderPlace, name: str, file: Path, *, sha256: str) -> None:
        if name.startswith("shard_00000"):
            assert second_ran.wait(20), "the second shard waited for the first one's upload"
        put_file(self, name, file, sha256=sha256)

    monkeypatch.setattr(FolderPlace, "put_file", slow)
    source = _Source(before_batch=lambda number: second_ran.set() if number else None)
    engine = NodeEngine(source, place.url, ASK, str(tmp_path / "spool"))
    engine.load()
    engine.join("run-1")

    with ThreadPoolExecutor(2) as pool:
        first, second = (pool.submit(engine.shard, plan) for plan in _plans(6))
        assert first.result().number == 0
        assert second.result().number == 1
    engine.close()


def test_close_stops_a_shard_within_a_batch(place: FolderPlace, tmp_path: Path) -> None:
    running, go_on = threading.Event(), threading.Event()

    def wait(number: int) -> None:
        running.set()
        assert number or go_on.wait(20)

    engine = NodeEngine(_Source(wait), place.url, HarvestAsk(layers=[1], shard_size=64), str(tmp_path / "spool"))
    engine.load()
    engine.join("run-1")
    plan = ShardPlan(0, 0, tuple(Tokenised(np.arange(4, 9, dtype=np.int32)) for _ in range(64)))

    with ThreadPoolExecutor(2) as pool:
        shard = pool.submit(engine.shard, plan)
        assert running.wait(20)
        closing = pool.submit(engine.close)
        while not engine._stop.is_set():
            pass
        go_on.set()
        with pytest.raises(HarvestFailed, match="the same call goes on"):
            shard.result(20)
        closing.result(20)

    assert place.names() == {"run.json"}
    assert list((tmp_path / "spool").iterdir()) == []


def test_a_folder_that_this_machine_does_not_see_is_refused(tmp_path: Path) -> None:
    engine = NodeEngine(_Source(), str(tmp_path / "elsewhere"), ASK)
    engine.load()

    with pytest.raises(InvalidInput, match=r"does not find run run-1 at .* all machines of the cluster share"):
        engine.join("run-1")


def test_a_folder_of_another_run_is_refused(place: FolderPlace) -> None:
    engine = NodeEngine(_Source(), place.url, ASK)
    engine.load()

    with pytest.raises(InvalidInput, match="does not find run run-2"):
        engine.join("run-2")


def test_it_can_be_closed_before_it_was_loaded(place: FolderPlace) -> None:
    NodeEngine(_Source(), place.url, ASK).close()
