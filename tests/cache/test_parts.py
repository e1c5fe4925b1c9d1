"""Several processes at once, and a writer that is killed at every step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamtap.cache import CacheStore, Channel, PromptKey
from streamtap.cache.layout import ChunkLayout
from streamtap.fingerprint import tokens_digest

CHANNELS = [Channel("layer_0", "float32", 4), Channel("layer_1", "float32", 4)]

# What both the children and this file take for prompt number n: three rows, each value made of n, channel and place.
SHARED = """
import numpy as np
from streamtap.cache import CacheStore, Channel, PromptKey
from streamtap.fingerprint import tokens_digest

CHANNELS = [Channel("layer_0", "float32", 4), Channel("layer_1", "float32", 4)]

def batch(numbers):
    ids = [np.array([7, n], np.int32) for n in numbers]
    keys = [PromptKey(tokens_digest(each), each) for each in ids]
    base = np.repeat(np.array(numbers, np.float32) * 100, 3)[:, None] + np.arange(4, dtype=np.float32)
    rows = {"layer_0": base + 1, "layer_1": base + 2}
    count = 3 * len(numbers)
    return keys, rows, np.arange(len(numbers) + 1) * 3, np.full(count, 7, np.int32), np.arange(count, dtype=np.int32)
"""

WRITE = (
    SHARED
    + """
import sys
root, numbers = sys.argv[1], [int(each) for each in sys.argv[2].split(",")]
print("ready", flush=True)
sys.stdin.readline()
with CacheStore(root) as store:
    set_id = store.ensure_set({"model": "a"}, {})
    with store.writer(set_id, CHANNELS) as writer:
        for start in range(0, len(numbers), 2):
            writer.append(*batch(numbers[start : start + 2]))
"""
)

# Each fork counts what it does to the disk and kills itself at its own step, before it or half way through.
KILL = (
    SHARED
    + """
import os, signal, sys
from streamtap.cache.index import Index

kill_at, step, half, tearable = -1, 0, False, []

def counted(real, torn=None):
    def wrapped(*args, **kwargs):
        global step
        step += 1
        if torn:
            tearable.append(step)
        if step == kill_at:
            if half:
                torn(*args)
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)
    return wrapped

def torn_write(fd, data, offset):
    pwrite(fd, data[: len(data) // 2], offset)

def torn_commit(self):
    commit(self)

pwrite, commit = os.pwrite, Index._commit
os.pwrite = counted(os.pwrite, torn_write)
os.fdatasync, os.fsync, os.ftruncate = counted(os.fdatasync), counted(os.fsync), counted(os.ftruncate)
Index._commit = counted(Index._commit, torn_commit)

def run(root):
    with CacheStore(root) as store:
        set_id = store.ensure_set({"model": "a"}, {})
        with store.writer(set_id, CHANNELS) as writer:
            for start in (0, 2):
                writer.append(*batch([start, start + 1]))

run(sys.argv[1] + "/whole")
steps, step = step, 0
for half, kills in ((False, range(1, steps + 1)), (True, tuple(tearable))):
    for kill_at in kills:
        child = os.fork()
        if child == 0:
            run(f"{sys.argv[1]}/{'half' if half else 'before'}_{kill_at:03d}")
            os._exit(0)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
print(steps, len(tearable))
"""
)


def expected(number: int, channel: int) -> Any:
    return np.repeat(np.array([number * 100], np.float32), 3)[:, None] + np.arange(4, dtype=np.float32) + channel + 1


def key(number: int) -> PromptKey:
    token_ids = np.array([7, number], np.int32)
    return PromptKey(tokens_digest(token_ids), token_ids)


def start(script: str, *args: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script, *args]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True)


def check(store: CacheStore, set_id: int, numbers: list[int]) -> None:
    for channel in range(2):
        rows = store.read(set_id, [key(number).digest for number in numbers], f"layer_{channel}")
        assert np.array_equal(rows.values, np.concatenate([expected(number, channel) for number in numbers]))
    assert store.verify().sound


def test_processes_that_make_one_cache_and_write_the_same_and_other_prompts(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    work = ["0,1,2,3,4,5,6,7", "0,1,2,3,4,5,6,7", "6,7,20,21,22,23"]
    children = [start(WRITE, str(root), numbers) for numbers in work]
    for child in children:
        assert child.stdout
        assert child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin
        child.stdin.write("go\n")
        child.stdin.close()
    assert [child.wait(60) for child in children] == [0, 0, 0]
    for child in children:
        assert child.stdout
        child.stdout.close()
    everything = [*range(8), 20, 21, 22, 23]
    with CacheStore(root) as store:
        (only,) = store.sets()
        check(store, only.id, everything)
        assert (only.prompts, only.rows) == (12, 36)
        assert len(store.read_all(only.id, "layer_0").digests) == 12
        assert len(list((root / "parts").glob("*.bin"))) <= 3


def test_a_writer_killed_at_every_step_leaves_a_sound_cache(tmp_path: Path) -> None:
    child = start(KILL, str(tmp_path))
    output, _ = child.communicate(timeout=120)
    assert child.returncode == 0
    steps, torn = map(int, output.split())
    # Two batches alone are twice 7 writes, a sync and a commit.
    assert steps > torn > 2 * (7 + 1)
    assert len(list(tmp_path.iterdir())) == 1 + steps + torn
    committed = set()
    for root in sorted(tmp_path.iterdir()):
        with CacheStore(root) as store:
            set_id = store.ensure_set({"model": "a"}, {})
            lacking = store.missing(set_id, [key(number).digest for number in range(4)], ["layer_0", "layer_1"])
            absent = lacking.get(("layer_0", "layer_1"), [])
            assert set(lacking) <= {("layer_0", "layer_1")}
            assert absent in ([], [2, 3], [0, 1, 2, 3])
            committed.add(4 - len(absent))
            check(store, set_id, [number for number in range(4) if number not in absent]) if len(absent) < 4 else None
            with store.writer(set_id, CHANNELS) as writer:
                for number in absent:
                    rows = {f"layer_{channel}": expected(number, channel) for channel in range(2)}
                    tokens, positions = np.full(3, 7, np.int32), np.arange(3, dtype=np.int32)
                    writer.append([key(number)], rows, np.array([0, 3]), tokens, positions)
            check(store, set_id, [0, 1, 2, 3])
            assert len(list((root / "parts").glob("*.bin"))) == 1
    assert committed == {0, 2, 4}


def test_a_part_held_by_another_is_passed_by(store: CacheStore, sample: Any) -> None:
    set_id = store.ensure_set({}, {})
    made = sample(CHANNELS, [1, 1])
    with CacheStore(store.root) as other, other.writer(set_id, CHANNELS) as held:
        with store.writer(set_id, CHANNELS) as writer:
            writer.append(*made.args(0, 1))
        held.append(*made.args(1, 2))
    assert len(list((store.root / "parts").glob("part_*.bin"))) == 2
    assert store.missing(set_id, made.digests, ["layer_0"]) == {}


def test_a_torn_tail_is_overwritten(store: CacheStore, sample: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = sample(CHANNELS, [2, 3, 4])
    set_id = store.ensure_set({}, {})
    with store.writer(set_id, CHANNELS) as writer:
        writer.append(*made.args(0, 1))
    file = store.root / "parts" / "part_000001.bin"
    with file.open("r+b") as stream:
        stream.seek(ChunkLayout.of(CHANNELS).offsets["layer_1"] + 2 * 16)
        stream.write(b"\xff" * 21)
        stream.seek(0, os.SEEK_END)
        stream.write(b"\xff" * 999)
    with store.writer(set_id, CHANNELS) as writer:
        writer.append(*made.args(1, 3))
    assert store.read(set_id, made.digests, "layer_1").values.tobytes() == made.rows["layer_1"].tobytes()
    assert store.verify().sound
