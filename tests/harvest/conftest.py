"""Harvests for the tests of what becomes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from streamtap.harvest.asked import HarvestAsk
from streamtap.harvest.plan import read_prompts
from streamtap.harvest.run import run_harvest
from streamtap.harvested.folder_place import FolderPlace
from streamtap.harvested.reader import HarvestedRun
from streamtap.testing.fake_engine import FakeEngine

#: Their first characters differ, and with them all rows but those of BOS.
PROMPTS = [f"{chr(33 + i)} and so it goes on"[: 3 + i * 5 % 17] for i in range(90)]


def _harvest(folder: Path, prompts: Iterable[Any] = PROMPTS, engine: Any = None, **asked: Any) -> HarvestedRun:
    engine = FakeEngine() if engine is None else engine
    ask = HarvestAsk(**{"layers": [1, 3], "shard_size": 8, "dtype": "float32", **asked})
    tokens = read_prompts(prompts, engine.tokenizer, add_special_tokens=ask.add_special_tokens)
    run_harvest(engine, tokens, FolderPlace(folder), ask, spool=folder / ".spool")
    return HarvestedRun.open(folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., HarvestedRun]:
    """Harvests of ``PROMPTS``, each made once."""
    made: dict[str, HarvestedRun] = {}

    def get(**asked: Any) -> HarvestedRun:
        key = repr(asked)
        if key not in made:
            made[key] = _harvest(tmp_path_factory.mktemp("run"), **asked)
        return made[key]

    return get


@pytest.fixture(scope="session")
def harvest() -> Callable[..., HarvestedRun]:
    """Harvests prompts, by default 90 of 3 to 18 tokens, into a folder."""
    return _harvest
