"""Whatever goes wrong and whenever: nothing is lost, nothing doubled, and what runs twice is at most a shard."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from streamtap.errors import HarvestFailed, HarvestMismatch, TransferFailed
from streamtap.harvest import shard_making
from streamtap.harvest.asked import HarvestAsk
from streamtap.harvest.background import Background
from streamtap.harvest.plan import read_prompts
from streamtap.harvest.record import ShardRecord
from streamtap.harvest.run import run_harvest
from streamtap.harvested.folder_place import FolderPlace
from streamtap.harvested.manifest import HarvestManifest
from streamtap.harvested.reader import HarvestedRun
from streamtap.testing.fake_engine import FakeEngine

SHARD = 8
PROMPTS = [f"prompt {i} {'x' * (i * 7 % 23)}" for i in range(43)]
ASK = HarvestAsk(layers=[1, 3], shard_size=SHARD)


def harvest(
    folder: Path,
    *,
    place: Any = None,
    engine: FakeEngine | None = None,
    spool: Path | None = None,
    ask: HarvestAsk = ASK,
    prompts: Sequence[str] = PROMPTS,
    **more: Any,
) -> HarvestManifest:
    engine = engine or FakeEngine()
    tokens = read_prompts(prompts, engine.tokenizer)
    place = place or FolderPlace(folder)
    return run_harvest(engine, tokens, place, ask, spool=spool or folder / ".spool", run_id="run", **more)


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("undisturbed")
    harvest(folder)
    return files(folder)


def repeated(engines: Sequence[FakeEngine]) -> int:
    counts = Counter(run.token_ids for engine in engines for run in engine.runs)
    assert len(counts) == len(PROMPTS)
    return sum(counts.values()) - len(counts)


# It loads once and forks a process for each try, which writes down each prompt as it runs it.
_KILLED = """
import os, random, signal, sys, time
from pathlib import Path
from streamtap.harvest.asked import HarvestAsk
from streamtap.harvest.local import harvest_prompts
from streamtap.testing.fake_engine import FakeEngine

folder, seed, n_prompts = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

class Noting(FakeEngine):
    def _batch(self, tokens, chosen, spec, layers):
        os.write(log, b"".join(each.token_ids.tobytes().hex().encode() + b"\\n" for each in tokens))
        time.sleep(0.002)
        return super()._batch(tokens, chosen, spec, layers)

def work():
    texts = [f"prompt {i} " + "x" * (i * 7 % 23) for i in range(n_prompts)]
    kept = {"layers": [1, 3], "shard_size": 8, "run_id": "run", "compression": sys.argv[4]}
    harvest_prompts(texts, engine=Noting(), out=folder / "run", **kept)
    os._exit(0)

choose, killed = random.Random(seed), 0
while True:
    begun = (folder / "log").stat().st_size
    pid = os.fork()
    if not pid:
        try:
            work()
        finally:
            os._exit(1)
    if killed == 20:
        assert os.waitpid(pid, 0)[1] == 0
        break
    # Into the run by up to a shard and a half, then anywhere: in a pass, in writing, in an upload.
    until = begun + choose.randrange(1, 12 * 100)
    while (folder / "log").stat().st_size < until and not os.waitpid(pid, os.WNOHANG)[0]:
        time.sleep(0.0005)
    time.sleep(choose.random() * 0.01)
    os.kill(pid, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    killed += 1
print(killed)
"""


@pytest.mark.parametrize(("seed", "compression"), [(1, "none"), (2, "zstd")])
def test_killed_twenty_times(tmp_path: Path, seed: int, compression: Any) -> None:
    n_prompts = 600
    done = subprocess.run(
        [sys.executable, "-c", _KILLED, str(tmp_path), str(seed), str(n_prompts), compression],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert (done.returncode, done.stdout) == (0, "20\n"), done.stderr
    counts = Counter((tmp_path / "log").read_text().split())
    texts = [f"prompt {i} {'x' * (i * 7 % 23)}" for i in range(n_prompts)]
    ask = HarvestAsk(layers=[1, 3], shard_size=SHARD, compression=compression)
    harvest(tmp_path / "whole", prompts=texts, ask=ask)
    assert len(counts) == n_prompts
    assert 0 < sum(counts.values()) - n_prompts <= 20 * SHARD
    assert files(tmp_path / "run") == files(tmp_path / "whole")
    HarvestedRun.open(tmp_path / "run").verify()


class Failing(FolderPlace):
    """Fails calls as ``fails`` says, before or after their work."""

    def __init__(self, path: Path, fails: Callable[[str, str], bool], *, after: bool = False) -> None:
        super().__init__(path)
        self._fails, self._after = fails, after

    def _or_fail(self, what: str, name: str, call: Callable[[], None]) -> None:
        if self._after:
            call()
        if self._fails(what, name):
            raise TransferFailed(f"the store failed for {name}")
        if not self._after:
            call()

    def put(self, name: str, data: bytes) -> None:
        self._or_fail("put", name, lambda: FolderPlace.put(self, name, data))

    def put_file(self, name: str, file: Path, *, sha256: str) -> None:
        self._or_fail("put_file", name, lambda: FolderPlace.put_file(self, name, file, sha256=sha256))

    def delete(self, name: str) -> None:
        self._or_fail("delete", name, lambda: FolderPlace.delete(self, name))


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_the_model_does_not_wait_for_packing_and_hashing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: Any
) -> None:
    engine, wrapped = FakeEngine(), shard_making.seal

    def slow(record: ShardRecord, folder: Path) -> ShardRecord:
        deadline = time.monotonic() + 20
        while record.number == 0 and len(engine.runs) < 2 * SHARD and time.monotonic() < deadline:
            time.sleep(0.01)
        assert record.number or len(engine.runs) >= 2 * SHARD, "the second shard waited for the first one's seal"
        return wrapped(record, folder)

    monkeypatch.setattr(shard_making, "seal", slow)
    harvest(tmp_path, engine=engine, ask=HarvestAsk(layers=[1, 3], shard_size=SHARD, compression=compression))

    HarvestedRun.open(tmp_path).verify()


@pytest.mark.parametrize("after", [False, True])
def test_a_store_that_fails_at_any_call_costs_no_pass(
    tmp_path: Path, undisturbed: dict[str, bytes], after: bool
) -> None:
    """Every write fails once, before or after it was done, and the run is begun again each time."""
    failed, engines = set[tuple[str, str]](), list[FakeEngine]()

    def fails(what: str, name: str) -> bool:
        is_new = (what, name) not in failed
        failed.add((what, name))
        return is_new

    for _ in range(40):
        engines.append(FakeEngine())
        try:
            harvest(tmp_path, place=Failing(tmp_path, fails, after=after), engine=engines[-1])
            break
        except TransferFailed:
            continue
    assert files(tmp_path) == undisturbed
    assert repeated(engines) == 0
    assert len(failed) == 6 * 3 + 3  # of each shard its file, its record, and that one removed; and what frames them


def test_a_store_that_is_gone_stops_the_model_soon_and_keeps_what_it_made(
    tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    engines = [FakeEngine(), FakeEngine()]
    with pytest.raises(TransferFailed):
        harvest(tmp_path, place=Failing(tmp_path, lambda what, _: what == "put_file"), engine=engines[0])
    made = len(engines[0].runs)
    harvest(tmp_path, engine=engines[1])

    assert made <= 5 * SHARD
    assert repeated(engines) == 0
    assert files(tmp_path) == undisturbed


def test_the_model_waits_for_a_slow_store(tmp_path: Path) -> None:
    """Back-pressure blocks: shards do not pile up, and none is dropped."""
    made: list[int] = []
    engine, release = FakeEngine(), threading.Event()

    class Slow(FolderPlace):
        def put_file(self, name: str, file: Path, *, sha256: str) -> None:
            assert release.wait(20)
            super().put_file(name, file, sha256=sha256)

    def watch() -> None:
        seen = -1
        while seen != len(engine.runs):
            seen = len(engine.runs)
            time.sleep(0.3)
        made.append(seen)
        release.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    manifest = harvest(tmp_path, place=Slow(tmp_path), engine=engine)
    watcher.join()

    assert made[0] <= 4 * SHARD < len(PROMPTS)
    assert manifest.n_prompts == len(PROMPTS)


def test_a_shard_that_was_taken_away_is_made_again(tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    engines = [FakeEngine(), FakeEngine()]
    calls = iter(range(100))
    with pytest.raises(HarvestFailed):
        harvest(tmp_path, engine=engines[0], should_stop=lambda: next(calls) > 6)
    (tmp_path / "shard_00001.safetensors").unlink()

    harvest(tmp_path, engine=engines[1])
    assert repeated(engines) == 2 * SHARD  # the one that was stopped, and the one that went
    assert files(tmp_path) == undisturbed


def test_a_model_that_fails_leaves_the_shards_before_it(tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    def fail(batch: int) -> None:
        if batch == 7:
            raise RuntimeError("the device is lost")

    engines = [FakeEngine(before_batch=fail), FakeEngine()]
    with pytest.raises(RuntimeError, match="the device is lost"):
        harvest(tmp_path, engine=engines[0])
    assert (tmp_path / "shard_00002.safetensors").exists()

    harvest(tmp_path, engine=engines[1])
    assert repeated(engines) <= SHARD
    assert files(tmp_path) == undisturbed


def test_ctrl_c_anywhere_leaves_a_run_that_goes_on(tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    engines: list[FakeEngine] = []
    choose, before = random.Random(0), set(threading.enumerate())
    for _ in range(10):
        stop_at = choose.randrange(1, 4)

        def interrupt(batch: int, at: int = stop_at) -> None:
            if batch == at:
                signal.raise_signal(signal.SIGINT)

        engines.append(FakeEngine(before_batch=interrupt))
        try:
            harvest(tmp_path, engine=engines[-1])
            break
        except KeyboardInterrupt:
            assert set(threading.enumerate()) <= before
    engines.append(FakeEngine())
    harvest(tmp_path, engine=engines[-1])

    assert files(tmp_path) == undisturbed
    assert repeated(engines) <= (len(engines) - 1) * SHARD


def test_two_processes_cannot_work_on_one_run(tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    refused: list[HarvestMismatch] = []
    engine = FakeEngine()

    def rival(batch: int) -> None:
        if batch != 3:
            return
        program = (
            "import sys; from pathlib import Path; from streamtap.harvest.local import harvest_prompts; "
            "from streamtap.testing.fake_engine import FakeEngine; "
            "harvest_prompts(['a'], engine=FakeEngine(), out=Path(sys.argv[1]))"
        )
        done = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 1
        assert "HarvestMismatch: another process harvests with" in done.stderr
        refused.append(HarvestMismatch(done.stderr))

    engine.before_batch = rival
    harvest(tmp_path, engine=engine)

    assert len(refused) == 1
    assert files(tmp_path) == undisturbed


def test_work_that_fails_as_it_is_waited_for_is_told() -> None:
    """A future wakes who waits before it calls back; a manifest must not be written in that moment."""

    class SlowToHear(Background):
        def _done(self, future: Any) -> None:
            time.sleep(0.05)
            super()._done(future)

    def fail() -> None:
        raise OSError("broken")

    def wait() -> None:
        with SlowToHear("test", most=4) as work:
            work.do(time.sleep, 0.1)
            work.do(fail)

    with pytest.raises(OSError, match="broken"):
        wait()
