"""A run on a real Ray cluster of machines that are processes here: one is killed, one comes, engines are killed."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.cluster_utils import Cluster

from streamtap.activations import Activations
from streamtap.errors import HarvestFailed, InvalidInput, InvalidPositions
from streamtap.harvest.asked import HarvestAsk
from streamtap.harvest.cluster import run_on_cluster
from streamtap.harvest.engine_source import ModelSource
from streamtap.harvest.plan import Tokenised, read_prompts
from streamtap.harvest.run import run_harvest
from streamtap.harvest.standing import Progress
from streamtap.harvested.folder_place import FolderPlace
from streamtap.spec import CaptureSpec, PromptLike
from streamtap.testing.fake_engine import FakeEngine

# What a worker of the cluster cannot import travels to it.
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.xdist_group("ray")

ASK = HarvestAsk(layers=[0, 2], shard_size=4)
N_SHARDS = 16
PROMPTS = [Tokenised(np.array([4 + i // 90, 4 + i % 90, *range(5, 6 + i % 7)], np.int32)) for i in range(4 * N_SHARDS)]
#: Not 127.0.0.1, for which Ray takes the address that other machines see.
_HERE = "127.0.0.2"
#: A machine that is gone is found out in a second instead of a quarter of a minute.
_QUICK = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 300,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}


class _Logged(FakeEngine):
    """Takes its time, and writes down which shard it begins: a line of its process and the first prompt's number."""

    log = Path()

    def capture(
        self, prompts: Iterable[PromptLike], spec: CaptureSpec, *, ordered: bool = True
    ) -> Iterator[Activations]:
        read = list(prompts)
        first = read[0].token_ids  # type: ignore[union-attr]
        with self.log.open("a") as file:
            file.write(f"{os.getpid()} {(first[0] - 4) * 90 + first[1] - 4}\n")
        return super().capture(read, spec, ordered=ordered)


@dataclass(frozen=True)
class _Source:
    """Engines that do not get far ahead until ``together`` of them are there."""

    log: Path
    together: int = 1

    def open(self) -> FakeEngine:
        engine = _Logged(batch_size=1, before_batch=self._wait)
        engine.log = self.log
        return engine

    def begun(self) -> list[tuple[int, int]]:
        """Process and shard, as they were begun."""
        lines = [line.split() for line in self.log.read_text().splitlines()]
        return [(int(process), int(prompt) // ASK.shard_size) for process, prompt in lines]

    def _wait(self, batch: int) -> None:
        time.sleep(0.02)
        deadline = time.monotonic() + 60
        while batch >= ASK.shard_size and len(dict(self.begun())) < self.together:
            assert time.monotonic() < deadline, "the other engines did not come"
            time.sleep(0.05)


class _Machines:
    """A cluster whose head runs no engine, and two machines of one CPU each."""

    def __init__(self) -> None:
        # The names of its sockets have to be short.
        self._folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
        os.environ |= {"RAY_TMPDIR": self._folder, "RAY_USAGE_STATS_ENABLED": "0"}
        head = {"num_cpus": 0, "node_ip_address": _HERE, "include_dashboard": False, "_system_config": _QUICK}
        self._cluster = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=True)
        self.nodes = [self._cluster.add_node(num_cpus=1, node_ip_address=_HERE, wait=False) for _ in range(2)]
        self._cluster.wait_for_nodes()

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def kill_one(self) -> None:
        self._cluster.remove_node(self.nodes.pop(), allow_graceful=False)

    def add_one(self) -> None:
        self.nodes.append(self._cluster.add_node(num_cpus=1, node_ip_address=_HERE))

    def close(self) -> list[str]:
        """End all of it; the processes that are left."""
        self._cluster.shutdown()
        deadline = time.monotonic() + 10
        while (left := self._processes()) and time.monotonic() < deadline:
            time.sleep(0.1)
        shutil.rmtree(self._folder, ignore_errors=True)
        return left

    def _processes(self) -> list[str]:
        found = []
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                command = file.read_bytes().decode(errors="replace").replace("\0", " ")
            except OSError:  # it ended
                continue
            found += [command] if self._folder in command else []
        return found


@pytest.fixture(scope="module")
def machines() -> Iterator[_Machines]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RAY_TMPDIR", "RAY_USAGE_STATS_ENABLED", "RAY_ADDRESS"):
            # So that both are as they were afterwards.
            patch.setenv(name, "")
            patch.delenv(name)
        machines = _Machines()
        yield machines
        assert machines.close() == []


@pytest.fixture(scope="module")
def driver(machines: _Machines) -> Iterator[str]:
    """The address of a cluster that this process is a driver of already."""
    ray.init(address=machines.address, log_to_driver=False)
    yield machines.address
    ray.shutdown()


@pytest.fixture
def source(tmp_path: Path) -> _Source:
    return _Source(tmp_path / "log", together=2)


@pytest.fixture
def place(tmp_path: Path) -> FolderPlace:
    return FolderPlace(tmp_path / "run")


def _alone(folder: Path, run_id: str = "r") -> dict[str, bytes]:
    place = FolderPlace(folder / "alone")
    run_harvest(FakeEngine(batch_size=1), PROMPTS, place, ASK, spool=folder / "spool", run_id=run_id)
    return _files(place)


def _files(place: FolderPlace) -> dict[str, bytes]:
    return {name: place.get(name) for name in place.names()}


def _whole(place: FolderPlace) -> set[int]:
    return {int(name[6:11]) for name in place.names() if name.startswith("whole_")}


def _at(n_shards: int, do: Callable[[], object]) -> Callable[[Progress], None]:
    """Does it when so many shards are whole."""
    return lambda progress: do() if progress.shards_done == n_shards else None


def _too_late() -> Callable[[], bool]:
    """So that a run that would wait for ever fails."""
    deadline = time.monotonic() + 90
    return lambda: time.monotonic() > deadline


def test_a_machine_that_dies_in_mid_run_changes_no_bit_and_repeats_no_whole_shard(
    machines: _Machines, source: _Source, place: FolderPlace, tmp_path: Path
) -> None:
    whole: set[int] = set()

    def kill() -> None:
        machines.kill_one()
        whole.update(_whole(place))

    manifest = run_on_cluster(
        PROMPTS,
        place.url,
        ASK,
        engine=source,
        address=machines.address,
        run_id="r",
        on_progress=_at(6, kill),
        should_stop=_too_late(),
    )

    assert manifest.n_prompts == len(PROMPTS)
    assert _files(place) == _alone(tmp_path)
    begun = Counter(shard for _, shard in source.begun())
    assert begun.keys() == set(range(N_SHARDS))
    assert len(whole) >= 6
    assert all(begun[shard] == 1 for shard in whole)
    assert begun.total() <= N_SHARDS + 2
    assert len(dict(source.begun())) == 2


def test_a_machine_that_comes_in_mid_run_takes_its_share(
    driver: str, machines: _Machines, source: _Source, place: FolderPlace, tmp_path: Path
) -> None:
    assert len(machines.nodes) == 1

    run_on_cluster(
        PROMPTS,
        place.url,
        ASK,
        engine=source,
        address=driver,
        run_id="r",
        on_progress=_at(1, machines.add_one),
        should_stop=_too_late(),
    )

    assert _files(place) == _alone(tmp_path)
    shares = Counter(process for process, _ in source.begun())
    assert len(shares) == 2
    assert min(shares.values()) >= 2
    assert shares.total() == N_SHARDS


def test_a_run_whose_engine_is_killed_and_that_is_stopped_goes_on(
    driver: str, source: _Source, place: FolderPlace, tmp_path: Path
) -> None:
    told: list[Progress] = []

    def hear(progress: Progress) -> None:
        told.append(progress)
        if len(told) == 2:
            os.kill(three.begun()[-1][0], signal.SIGKILL)

    # Two engines make a shard each, and wait in their second one for another that takes the place of one of them.
    three = _Source(source.log, together=3)
    named: dict[str, Any] = {"engine": three, "address": driver, "on_progress": hear}
    with pytest.raises(HarvestFailed, match="the same call goes on"):
        run_on_cluster(PROMPTS, place.url, ASK, run_id="r", should_stop=lambda: len(told) >= 8, **named)
    whole, before = _whole(place), source.begun()
    run_on_cluster(PROMPTS, place.url, ASK, **named)

    assert _files(place) == _alone(tmp_path)
    assert len(whole) >= 8
    assert len(dict(before)) == 3
    assert len(before) == len({shard for _, shard in before}) + 1, "one shard was lost with its engine"
    assert {shard for _, shard in source.begun()[len(before) :]} == set(range(N_SHARDS)) - whole
    assert {each.name for each in place.folder.iterdir()} == place.names(), "a spool was left"


def test_a_real_model_and_the_tokenizer_of_its_engine(driver: str, place: FolderPlace, tmp_path: Path) -> None:
    from streamtap.engines.transformers import TransformersEngine
    from streamtap.testing.models import tiny_model
    from streamtap.testing.tokenizers import tiny_tokenizer

    folder = tmp_path / "model"
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    texts = [f"prompt {i} " + "and so on, " * (i % 4) for i in range(10)]
    ask = HarvestAsk(layers="all", shard_size=4, dtype="float32")
    source = ModelSource(str(folder), {"device": "cpu"})

    run_on_cluster(
        lambda tokenizer: read_prompts(texts, tokenizer),
        place.url,
        ask,
        engine=source,
        address=driver,
        engines=1,
        run_id="r",
    )

    engine = TransformersEngine.load(str(folder), device="cpu")
    alone = FolderPlace(tmp_path / "alone")
    run_harvest(engine, read_prompts(texts, engine.tokenizer), alone, ask, spool=tmp_path / "spool", run_id="r")
    engine.close()
    assert _files(place) == _files(alone)


def test_what_an_engine_raises_is_raised_here_as_it_is(driver: str, source: _Source, place: FolderPlace) -> None:
    ask = HarvestAsk(layers=[0], positions=[7], shard_size=4)

    with pytest.raises(InvalidPositions, match="prompt 0"):
        run_on_cluster(PROMPTS, place.url, ask, engine=source, address=driver, engines=1)


def test_machines_that_the_cluster_has_not_are_refused_at_once(
    driver: str, source: _Source, place: FolderPlace
) -> None:
    with pytest.raises(InvalidInput, match="no machine of the Ray cluster has 1 CPU and 1 GPU"):
        run_on_cluster(PROMPTS, place.url, ASK, engine=source, address=driver, gpus_per_engine=1)


def test_no_other_cluster_is_taken_for_the_one_of_this_process(
    driver: str, source: _Source, place: FolderPlace
) -> None:
    with pytest.raises(InvalidInput, match=f"uses the Ray cluster at {driver} already"):
        run_on_cluster(PROMPTS, place.url, ASK, engine=source, address="10.0.0.1:6379")

    assert ray.is_initialized()
