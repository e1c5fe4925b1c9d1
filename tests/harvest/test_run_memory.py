"""What a run holds does not grow with its prompts, but for what the manifest says of each."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from streamtap.harvest.asked import HarvestAsk
from streamtap.harvest.plan import Tokenised
from streamtap.harvest.run import run_harvest
from streamtap.harvested.folder_place import FolderPlace
from streamtap.testing.fake_engine import FakeEngine


def prompts(count: int) -> Iterator[Tokenised]:
    for number in range(count):
        yield Tokenised(np.array([4 + number % 50, 5, 6], np.int32))


def peak(folder: Path, count: int) -> int:
    tracemalloc.start()
    try:
        ask = HarvestAsk(layers=[1], shard_size=100)
        run_harvest(FakeEngine(hidden=256), prompts(count), FolderPlace(folder), ask, spool=folder / ".spool")
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_twenty_times_the_prompts_take_little_more(tmp_path: Path) -> None:
    few, many = peak(tmp_path / "few", 200), peak(tmp_path / "many", 4000)

    # Of a prompt the manifest keeps two names and two shapes; its rows alone have 1536 bytes.
    assert (many - few) / 3800 < 800
