"""Runs to read, made by an engine whose rows are known beforehand, and places that count what is read of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from streamtap.harvest.asked import HarvestAsk
from streamtap.harvest.plan import Tokenised
from streamtap.harvest.run import run_harvest
from streamtap.harvested.folder_place import FolderPlace
from streamtap.pooling import pool
from streamtap.positions import choose_positions
from streamtap.testing.fake_engine import FakeEngine

Array = NDArray[Any]


@dataclass
class Made:
    """A finished run, and what it was made of."""

    folder: Path
    engine: FakeEngine
    prompts: list[Tokenised]
    ask: HarvestAsk

    def positions(self, i: int) -> Array:
        """Positions of the rows of prompt ``i``, by the rules and not by the run."""
        chosen = choose_positions(self.ask.positions, self.prompts[i].token_ids, index=i)
        if self.ask.pooling == "none":
            return chosen
        return {"last_token": chosen[-1:], "first_token": chosen[:1]}.get(self.ask.pooling, np.array([-1], np.int32))

    def rows(self, i: int, layer: int) -> Array:
        """Rows of prompt ``i``, by the engine's formula and not by the run."""
        ids = self.prompts[i].token_ids
        rows = self.engine.rows(ids, layer)[choose_positions(self.ask.positions, ids, index=i)]
        if self.ask.pooling != "none":
            rows = pool(rows, np.array([0, len(rows)]), self.ask.pooling)
        if self.ask.projection is not None:
            return rows.astype(np.float32) @ self.ask.projection.directions.T
        return rows.astype(ml_dtypes.bfloat16 if self.ask.dtype == "bfloat16" else self.ask.dtype)


@dataclass
class CountedPlace:
    """A folder as if it lay behind a network, which counts; a ``streamtap.harvested.places.Place``."""

    folder: Path
    url: str = "s3://far/away"
    asked: list[tuple[str, int, int]] = field(default_factory=list)
    most_at_once: int = 0

    def __post_init__(self) -> None:
        self._near = FolderPlace(self.folder)
        self._lock, self._now = threading.Lock(), 0

    def get(self, name: str) -> bytes:
        return self.get_range(name, 0, 1 << 40)

    def get_range(self, name: str, start: int, stop: int) -> bytes:
        with self._lock:
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        data = self._near.get_range(name, start, stop)
        with self._lock:
            self._now -= 1
            self.asked.append((name, start, start + len(data)))
        return data

    def bytes_of(self, ending: str) -> int:
        """Bytes that came of files of such names."""
        return sum(stop - start for name, start, stop in self.asked if name.endswith(ending))


@pytest.fixture(scope="session")
def make_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Made]:
    """Makes runs; without prompts, of ``n_prompts`` of 1 to 13 tokens."""

    def make(
        *,
        n_prompts: int = 11,
        prompts: Sequence[Tokenised] | None = None,
        hidden: int = 5,
        layers: Sequence[int] = (0, 2, 3),
        shard_size: int = 4,
        folder: Path | None = None,
        **ask: Any,
    ) -> Made:
        engine = FakeEngine(hidden=hidden, context_tokens=512)
        given = list(prompts) if prompts is not None else [_prompt(i) for i in range(n_prompts)]
        asked = HarvestAsk(layers=list(layers), shard_size=shard_size, **ask)
        place = folder or tmp_path_factory.mktemp("run") / "run"
        spool = tmp_path_factory.mktemp("spool")
        run_harvest(engine, given, FolderPlace(place), asked, spool=spool)
        return Made(place, engine, given, asked)

    return make


def _prompt(i: int) -> Tokenised:
    length = 1 + 7 * i % 13
    return Tokenised(((np.arange(length) * 31 + i * 17) % 97).astype(np.int32))


@pytest.fixture(scope="session")
def counted() -> Callable[[Path], CountedPlace]:
    """Puts a folder behind a network that counts."""
    return CountedPlace
