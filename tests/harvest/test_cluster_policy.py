"""What a run on a cluster does when engines come, fail and go; the engines are in this process, and the cluster is not.

``test_cluster.py`` is the same on a real one.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamtap.errors import (
    EngineOutOfMemory,
    HarvestFailed,
    HarvestMismatch,
    HarvestUnavailable,
    InvalidInput,
    StreamtapError,
    TransferFailed,
)
from streamtap.harvest import cluster
from streamtap.harvest.asked import HarvestAsk
from streamtap.harvest.cluster_pool import Answer, EngineGone, Needs
from streamtap.harvest.node_engine import NodeEngine
from streamtap.harvest.plan import ShardPlan, Tokenised
from streamtap.harvest.run import run_harvest
from streamtap.harvest.standing import Progress
from streamtap.harvested.folder_place import FolderPlace
from streamtap.testing.fake_engine import FakeEngine

ASK = HarvestAsk(layers="all", shard_size=3)
GONE = EngineGone("NodeDiedError: the machine is gone")
PROMPTS = [Tokenised(np.arange(4, 6 + i % 9, dtype=np.int32)) for i in range(20)]
#: What becomes of a call to an engine; None lets it be made.
Fate = Callable[[int, str | int], Any]


@dataclass
class _Source:
    commits: Iterator[str] = field(default_factory=lambda: iter(lambda: "fake-1", None))
    opened: list[FakeEngine] = field(default_factory=list)

    def open(self) -> FakeEngine:
        self.opened.append(FakeEngine(named={"commit": next(self.commits)}))
        return self.opened[-1]

    def times_run(self) -> Counter[tuple[int, ...]]:
        return Counter(run.token_ids for engine in self.opened for run in engine.runs)


class _Pool:
    """Makes each call at once, unless ``fate`` has another end for it."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.engines: dict[int, NodeEngine] = {}
        self.n_placed = 0
        self.asked: list[tuple[int, str | int]] = []
        self.fate: Fate = lambda _engine, _call: None
        self.has_room = True
        self.closed = False
        self._numbers = count()
        self._answers: deque[Answer] = deque()

    def __len__(self) -> int:
        return len(self.engines)

    def ask_for_one(self) -> None:
        engine = next(self._numbers)
        self.engines[engine] = NodeEngine(*self.arguments)
        if self.has_room:
            self.n_placed += 1
            self.call(engine, "there")

    def call(self, engine: int, method: str, *args: Any) -> None:
        self._answers.append(Answer(engine, method, self._value(engine, method, *args)))

    def ask(self, engine: int, method: str) -> Any:
        return self._value(engine, method)

    def make(self, engine: int, plan: ShardPlan) -> None:
        self._answers.append(Answer(engine, plan, self._value(engine, "shard", plan)))

    def answers(self, _seconds: float) -> Iterator[Answer]:
        for _ in range(len(self._answers)):
            if self._answers and (answer := self._answers.popleft()).engine in self.engines:
                yield answer

    def let_go(self, engine: int) -> None:
        self.engines.pop(engine).close()
        self.n_placed -= 1

    def close(self) -> None:
        self.closed = True
        for engine in list(self.engines):
            self.let_go(engine)

    def _value(self, engine: int, method: str, *args: Any) -> Any:
        call = args[0].number if method == "shard" else method
        self.asked.append((engine, call))
        if (end := self.fate(engine, call)) is not None:
            return end
        try:
            return getattr(self.engines[engine], method)(*args)
        except StreamtapError as error:
            return error


class _Cluster:
    """Runs ``PROMPTS`` on machines that have room for ``room`` engines."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.source, self.place = _Source(), FolderPlace(folder / "run")
        self.room, self.gpus = 2, False
        self.fate: Fate = lambda _engine, _call: None
        self.has_room = True
        self.progress: list[Progress] = []
        monkeypatch.setattr(cluster, "EnginePool", self._pool)
        monkeypatch.setattr(cluster, "room_for", lambda _needs: self.room)
        monkeypatch.setattr(cluster, "has_gpus", lambda: self.gpus)
        monkeypatch.setattr(cluster, "connected", lambda _address: nullcontext())
        monkeypatch.setattr(cluster, "_POLL_SECONDS", 0.0)

    def run(self, prompts: Any = PROMPTS, ask: HarvestAsk = ASK, **named: Any) -> Any:
        return cluster.run_on_cluster(
            prompts, self.place.url, ask, engine=self.source, on_progress=self.progress.append, **named
        )

    def shards_asked(self) -> list[tuple[int, str | int]]:
        return [each for each in self.pool.asked if isinstance(each[1], int)]

    def _pool(self, needs: Needs, *arguments: Any) -> _Pool:
        self.needs = needs
        self.pool = _Pool(*arguments)
        self.pool.fate, self.pool.has_room = self.fate, self.has_room
        return self.pool


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Cluster:
    return _Cluster(tmp_path, monkeypatch)


def _files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def _once(*ends: tuple[int, str | int, Any]) -> Fate:
    """Each of (engine, call, end) happens once."""
    left = list(ends)

    def fate(engine: int, call: str | int) -> Any:
        for each in left:
            if each[:2] == (engine, call):
                left.remove(each)
                return each[2]
        return None

    return fate


def test_the_files_are_those_of_one_machine(machines: _Cluster, tmp_path: Path) -> None:
    manifest = machines.run(run_id="r")

    alone = FolderPlace(tmp_path / "alone")
    expected = run_harvest(FakeEngine(), PROMPTS, alone, ASK, spool=tmp_path / "spool", run_id="r")
    assert manifest == expected
    assert _files(machines.place.folder) == _files(alone.folder)
    assert {engine for engine, _ in machines.shards_asked()} == {0, 1}
    assert machines.progress[-1] == Progress(7, 20, sum(len(each.token_ids) for each in PROMPTS))
    assert machines.pool.closed


def test_the_shards_of_an_engine_that_goes_run_elsewhere_and_no_others_again(machines: _Cluster) -> None:
    machines.fate = _once((1, 3, GONE))

    machines.run()

    # Of the two that it had, the first was whole by then.
    assert Counter(shard for _, shard in machines.shards_asked()) == Counter([*range(7), 3])
    assert machines.shards_asked()[-1][0] != 1
    assert machines.progress[-1].shards_done == 7


def test_a_shard_whose_answer_was_lost_with_its_engine_is_not_run_again(machines: _Cluster) -> None:
    def fate(engine: int, call: str | int) -> Any:
        if (engine, call) != (1, 1):
            return None
        plan = ShardPlan(1, 3, tuple(PROMPTS[3:6]))
        machines.pool.engines[1].shard(plan)
        return GONE

    machines.fate = fate
    machines.run()

    assert [shard for _, shard in machines.shards_asked()].count(1) == 1
    assert machines.source.times_run() == Counter(tuple(each.token_ids.tolist()) for each in PROMPTS)


def test_a_shard_that_ends_its_engines_ends_the_run(machines: _Cluster) -> None:
    machines.fate = lambda _engine, call: GONE if call == 2 else None

    with pytest.raises(HarvestFailed, match=r"shard 2 \(prompts 6 to 8\) was at work on 4 engines .* NodeDiedError"):
        machines.run()

    assert [shard for _, shard in machines.shards_asked()].count(2) == 4


def test_engines_that_end_before_they_are_ready_end_the_run(machines: _Cluster) -> None:
    machines.fate = lambda _engine, call: GONE if call == "load" else None

    with pytest.raises(HarvestFailed, match=r"4 engines in a row ended before they were ready \(NodeDiedError"):
        machines.run()


def test_a_few_bad_starts_are_borne(machines: _Cluster) -> None:
    machines.fate = _once((0, "load", GONE), (1, "join", GONE), (2, "there", GONE))

    assert machines.run().n_prompts == 20


def test_what_could_not_be_uploaded_is_tried_again_from_the_spool(
    machines: _Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_file, failures = FolderPlace.put_file, iter(range(3))

    def put(self: FolderPlace, name: str, file: Path, *, sha256: str) -> None:
        if name == "shard_00001.safetensors" and next(failures, None) is not None:
            raise TransferFailed("the store is away")
        put_file(self, name, file, sha256=sha256)

    monkeypatch.setattr(FolderPlace, "put_file", put)
    machines.run()

    assert machines.shards_asked().count((1, 1)) == 4
    assert machines.source.times_run() == Counter(tuple(each.token_ids.tolist()) for each in PROMPTS)


def test_a_store_that_stays_away_ends_the_run(machines: _Cluster) -> None:
    machines.fate = lambda _engine, call: TransferFailed("the store is away") if call == 4 else None

    with pytest.raises(TransferFailed, match="the store is away"):
        machines.run()

    assert machines.pool.closed


def test_what_may_pass_is_tried_again(machines: _Cluster) -> None:
    machines.fate = _once((0, 0, EngineOutOfMemory("one prompt does not fit")))

    assert machines.run().n_prompts == 20


def test_what_will_not_pass_ends_the_run_at_once(machines: _Cluster) -> None:
    ask = HarvestAsk(layers="all", shard_size=3, positions=[5])

    with pytest.raises(InvalidInput, match="prompt 0"):
        machines.run(ask=ask)

    assert machines.pool.closed


def test_engines_of_different_models_are_refused(machines: _Cluster) -> None:
    machines.source.commits = iter(["fake-1", "fake-2"])

    with pytest.raises(HarvestMismatch, match="has commit 'fake-1', and another 'fake-2'; see that every machine"):
        machines.run()


def test_prompts_may_be_made_with_the_tokenizer_of_an_engine(machines: _Cluster) -> None:
    seen = []

    def prompts(tokenizer: Any) -> list[Tokenised]:
        seen.append(tokenizer)
        return [Tokenised(tokenizer.read("hello", 0))]

    machines.fate = _once((0, "tokenizer", GONE))
    manifest = machines.run(prompts)

    assert manifest.n_prompts == 1
    assert seen == [machines.source.opened[1].tokenizer]


def test_no_more_engines_are_asked_for_than_there_are_shards(machines: _Cluster) -> None:
    machines.room = 50

    machines.run(PROMPTS[:5])

    assert len(machines.source.opened) == 2


def test_engines_are_no_more_than_asked_for(machines: _Cluster) -> None:
    machines.room = 50

    machines.run(engines=3)

    assert len(machines.source.opened) == 3


def test_a_cluster_that_grows_is_used(machines: _Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_LOOK_SECONDS", 0.0)
    machines.room = 1

    def fate(_engine: int, call: str | int) -> None:
        machines.room = 3 if call == 1 else machines.room

    machines.fate = fate
    machines.run(PROMPTS * 3)

    assert len(machines.source.opened) == 3
    assert {engine for engine, _ in machines.shards_asked()} == {0, 1, 2}


def test_a_cluster_without_such_machines_is_refused(machines: _Cluster) -> None:
    machines.room = 0

    with pytest.raises(InvalidInput, match="no machine of the Ray cluster has 4 CPU and 1 GPU"):
        machines.run(cpus_per_engine=4, gpus_per_engine=1)


def test_a_cluster_that_is_to_grow_is_waited_for_and_not_for_ever(machines: _Cluster) -> None:
    machines.room, machines.has_room = 0, False

    with pytest.raises(HarvestUnavailable, match=r"had 1 CPU free for 0\.05 s; what is whole stays"):
        machines.run(engines=2, patience_seconds=0.05)


def test_a_stop_is_heeded_and_the_same_call_goes_on(machines: _Cluster) -> None:
    with pytest.raises(HarvestFailed, match="the same call goes on"):
        machines.run(should_stop=lambda: len(machines.progress) >= 3)
    whole = {int(name[6:11]) for name in machines.place.names() if name.startswith("whole_")}
    ran_before = set(machines.shards_asked())

    manifest = machines.run()

    assert len(whole) >= 3
    assert {shard for _, shard in ran_before} >= whole
    assert {shard for _, shard in machines.shards_asked()} == set(range(7)) - whole
    assert manifest.n_prompts == 20
    assert machines.progress[-1].shards_done == 7
    assert machines.progress[-1].tokens_found > 0


def test_a_run_that_is_whole_is_not_run_again(machines: _Cluster) -> None:
    manifest = machines.run()

    assert machines.run() == manifest
    assert machines.shards_asked() == []
    with pytest.raises(HarvestMismatch, match="other prompts"):
        machines.run(PROMPTS[:-1])


def test_nothing_to_harvest_is_said(machines: _Cluster) -> None:
    with pytest.raises(InvalidInput, match="there is nothing to harvest"):
        machines.run([])


def test_a_run_in_a_folder_leaves_the_run_alone_there(machines: _Cluster) -> None:
    machines.run()

    own = {"manifest.json", "run.json", "stats.safetensors", *(f"shard_{i:05d}.safetensors" for i in range(7))}
    assert {each.name for each in machines.place.folder.iterdir()} == own


def test_two_runs_in_one_folder_at_a_time_are_refused(machines: _Cluster) -> None:
    def again(_progress: Progress) -> None:
        with pytest.raises(HarvestMismatch, match="another process"):
            machines.run()
        raise InterruptedError

    with pytest.raises(InterruptedError):
        cluster.run_on_cluster(PROMPTS, machines.place.url, ASK, engine=machines.source, on_progress=again)


@pytest.mark.parametrize(
    ("gpus", "asked", "expected"), [(False, None, 0), (True, None, 1), (True, 0, 0), (True, 0.5, 0.5), (False, 2, 2)]
)
def test_an_engine_takes_a_gpu_where_there_are_any(
    machines: _Cluster, gpus: bool, asked: float | None, expected: float
) -> None:
    machines.gpus = gpus

    machines.run(gpus_per_engine=asked)

    assert machines.needs == Needs(1, expected)


@pytest.mark.parametrize("engines", [0, -1])
def test_engines_must_be_some(machines: _Cluster, engines: int) -> None:
    with pytest.raises(InvalidInput, match="at least 1"):
        machines.run(engines=engines)
