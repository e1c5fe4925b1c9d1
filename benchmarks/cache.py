"""The cache at full size: pooled float32 rows of many prompts at every layer of a small model.

    python benchmarks/cache.py [--prompts 20000 --layers 30 --hidden 576 --json OUT]

Writes to a temporary folder (1.4 GB at the default sizes) and removes it. Each figure stands
beside what is required of it; reading is a ratio to ``numpy.load`` of the same array, both warm.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamtap.cache import CacheStore, Channel, PromptKey
from streamtap.fingerprint import tokens_digest

BATCH = 8
REPEATS = 15
LOOKED_UP = 1000
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Figure:
    """One measured value; ``limit`` is the most it may be, None where nothing is required."""

    name: str
    value: float
    unit: str
    limit: float | None = None

    @property
    def met(self) -> bool:
        """Whether it is within its limit."""
        return self.limit is None or self.value <= self.limit


def main() -> None:
    """Measure, print a table, write JSON where asked."""
    parser = argparse.ArgumentParser(description="Measure the local cache.")
    parser.add_argument("--prompts", type=int, default=20_000)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="streamtap-bench-") as folder, CacheStore(Path(folder) / "cache") as store:
        figures = measure(store, Path(folder), args.prompts, args.layers, args.hidden)
    show(figures)
    if args.json:
        args.json.write_text(json.dumps([{**asdict(each), "met": each.met} for each in figures], indent=1) + "\n")
    if not all(each.met for each in figures):
        raise SystemExit("a required value was not reached")


def measure(store: CacheStore, folder: Path, prompts: int, layers: int, hidden: int) -> list[Figure]:
    """Fill the cache with ``prompts`` rows a layer, then time what users do."""
    channels = [Channel(f"layer_{layer}", "float32", hidden) for layer in range(layers)]
    keys = [_key(number) for number in range(prompts)]
    set_id = store.ensure_set({"benchmark": "cache"}, {})
    seconds = _fill(store, set_id, channels, keys)
    megabytes = prompts * layers * hidden * 4 / 1e6
    digests = [key.digest for key in keys]
    some = [digests[i] for i in np.random.default_rng(1).permutation(prompts)[:LOOKED_UP]]
    names = [channel.name for channel in channels]
    middle = names[layers // 2]
    ours, theirs = _layer_times(store, set_id, middle, folder)
    return [
        Figure(
            f"append {megabytes:.0f} MB, {BATCH} prompts at a time, each batch durable", megabytes / seconds, "MB/s"
        ),
        Figure("read one layer as one checked array", ours * 1e3, "ms"),
        Figure("numpy.load of that array", theirs * 1e3, "ms"),
        Figure("ratio of the two", ours / theirs, "x", 2.0),
        Figure(
            f"look up and read {len(some)} prompts", 1e3 * _median(lambda: store.read(set_id, some, middle)), "ms", 50.0
        ),
        Figure(f"missing, {prompts} prompts", 1e3 * _median(lambda: store.missing(set_id, digests, names), 5), "ms"),
        Figure("view one layer by memory map", 1e3 * _median(lambda: store.view(set_id, middle)), "ms"),
        Figure("files in the cache", sum(file.is_file() for file in store.root.rglob("*")), "", 199),
        Figure("size on disk over the rows' bytes", store.size_bytes() / (megabytes * 1e6), "x"),
    ]


def show(figures: list[Figure]) -> None:
    """Print the table."""
    width = max(len(each.name) for each in figures)
    print(f"{'what':{width}}  {'measured':>12}  must reach")
    for each in figures:
        limit = "" if each.limit is None else f"<= {each.limit:g} {each.unit}  {'ok' if each.met else 'NOT MET'}"
        print(f"{each.name:{width}}  {each.value:>9.2f} {each.unit:4}  {limit}")


def _fill(store: CacheStore, set_id: int, channels: list[Channel], keys: list[PromptKey]) -> float:
    """Append every prompt; the seconds spent in ``append`` alone."""
    random = np.random.default_rng(0)
    positions, spent = np.zeros(BATCH, np.int32), 0.0
    with store.writer(set_id, channels) as writer:
        for start in range(0, len(keys), BATCH):
            some = keys[start : start + BATCH]
            rows = {each.name: random.standard_normal((len(some), each.width), np.float32) for each in channels}
            token_ids = np.array([key.token_ids[-1] for key in some], np.int32)
            offsets = np.arange(len(some) + 1)
            begun = time.perf_counter()
            writer.append(some, rows, offsets, token_ids, positions[: len(some)])
            spent += time.perf_counter() - begun
    return spent


def _layer_times(store: CacheStore, set_id: int, channel: str, folder: Path) -> tuple[float, float]:
    """Median seconds of one layer from the cache and from ``numpy.load``, measured turn by turn."""
    file = folder / "layer.npy"
    np.save(file, store.read_all(set_id, channel).values)
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(REPEATS):
        with _timed(ours):
            values: Floats = store.read_all(set_id, channel).values
        with _timed(theirs):
            loaded: Floats = np.load(file)
        if not np.array_equal(values, loaded):
            raise SystemExit("the cache and numpy.load disagree")
    return statistics.median(ours), statistics.median(theirs)


def _median(action: Callable[[], Any], repeats: int = REPEATS) -> float:
    times: list[float] = []
    for _ in range(repeats):
        with _timed(times):
            action()
    return statistics.median(times)


@contextmanager
def _timed(into: list[float]) -> Iterator[None]:
    begun = time.perf_counter()
    yield
    into.append(time.perf_counter() - begun)


def _key(number: int) -> PromptKey:
    token_ids = np.array([1, number, 2 * number, 7], np.int32)
    return PromptKey(tokens_digest(token_ids), token_ids)


if __name__ == "__main__":
    main()
