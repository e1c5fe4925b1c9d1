"""Small caches and batches for these tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from streamtap.cache import CacheStore, Channel, PromptKey
from streamtap.cache.layout import stored_dtype
from streamtap.fingerprint import tokens_digest


@dataclass
class Sample:
    """Prompts with rows at some channels; ``append`` arguments by ``args``."""

    keys: list[PromptKey]
    rows: dict[str, NDArray[Any]]
    offsets: NDArray[np.int64]
    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32]

    @property
    def digests(self) -> list[bytes]:
        return [key.digest for key in self.keys]

    def args(self, start: int = 0, stop: int | None = None, names: Sequence[str] | None = None) -> tuple[Any, ...]:
        stop = len(self.keys) if stop is None else stop
        low, high = self.offsets[start], self.offsets[stop]
        rows = {name: self.rows[name][low:high] for name in names or self.rows}
        offsets = self.offsets[start : stop + 1] - low
        return self.keys[start:stop], rows, offsets, self.token_ids[low:high], self.positions[low:high]

    def of(self, place: int, name: str) -> NDArray[Any]:
        return self.rows[name][self.offsets[place] : self.offsets[place + 1]]


MakeSample = Callable[..., Sample]


def _sample(channels: Sequence[Channel], counts: Sequence[int], seed: int = 0, first: int = 0) -> Sample:
    random = np.random.default_rng(seed)
    total = int(sum(counts))
    rows = {}
    for channel in channels:
        dtype = stored_dtype(channel.dtype)
        data = random.integers(0, 256, total * channel.row_bytes, np.uint8)
        rows[channel.name] = data.view(dtype).reshape(total, channel.width)
    keys = []
    for number in range(first, first + len(counts)):
        token_ids = np.array([1, number, 5], np.int32)
        keys.append(PromptKey(tokens_digest(token_ids), token_ids))
    offsets = np.concatenate([[0], np.cumsum(np.array(counts, np.int64))]).astype(np.int64)
    token_ids = random.integers(0, 50_000, total, np.int32)
    positions = np.arange(total, dtype=np.int32)
    return Sample(keys, rows, offsets, token_ids, positions)


@pytest.fixture
def sample() -> MakeSample:
    """Make prompts of ``counts`` rows of random bytes at ``channels``."""
    return _sample


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CacheStore]:
    with CacheStore(tmp_path / "cache") as opened:
        yield opened


@pytest.fixture
def layers() -> list[Channel]:
    return [Channel(f"layer_{number}", "float32", 12) for number in range(3)]


@pytest.fixture
def filled(store: CacheStore, layers: list[Channel], sample: MakeSample) -> tuple[CacheStore, int, Sample]:
    """A store with one set of six ragged prompts."""
    made = sample(layers, [3, 1, 0, 5, 2, 4])
    set_id = store.ensure_set({"model": "a"}, {"engine": "test"})
    with store.writer(set_id, layers) as writer:
        writer.append(*made.args())
    return store, set_id, made
