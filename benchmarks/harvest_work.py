"""Harvests that are measured: of a model, of arithmetic alone, and of two engines on a cluster."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from streamtap.engines.base import Engine
from streamtap.harvest.asked import HarvestAsk
from streamtap.harvest.engine_source import ModelSource
from streamtap.harvest.plan import Tokenised, read_prompts
from streamtap.harvest.run import run_harvest
from streamtap.harvested.manifest import HarvestManifest
from streamtap.harvested.opening import open_place
from streamtap.testing import FakeEngine

HIDDEN, SHORTEST, LONGEST = 576, 64, 448
#: Of runs on a cluster, small enough that two engines end together.
SHARD_PROMPTS = 8


def harvest(engine: Engine, prompts: Sequence[str], place: str, spool: Path, layers: Sequence[int]) -> HarvestManifest:
    """Every token's row of ``layers`` into a folder or an object store."""
    return harvest_tokenised(engine, read_prompts(prompts, engine.tokenizer), place, spool, layers)


def harvest_tokenised(
    engine: Engine, prompts: Iterable[Tokenised], place: str, spool: Path, layers: Sequence[int], shard_size: int = 32
) -> HarvestManifest:
    """The same of prompts that are token ids already."""
    ask = HarvestAsk(layers=list(layers), shard_size=shard_size)
    return run_harvest(engine, prompts, open_place(place), ask, spool=spool)


def fake_harvest(folder: Path, spool: Path, rows: int) -> None:
    """A run of at least ``rows`` rows of one layer, as wide as the demo model's, made without a model."""

    engine = FakeEngine(n_layers=3, hidden=HIDDEN, dtype="bfloat16", context_tokens=LONGEST)
    harvest_tokenised(engine, _random_prompts(rows), str(folder), spool, [1])


def _random_prompts(rows: int) -> Iterator[Tokenised]:
    order = np.random.default_rng(0)
    while rows > 0:
        count = int(order.integers(SHORTEST, LONGEST + 1))
        yield Tokenised(order.integers(4, 60, count, np.int32))
        rows -= count


def tokens_per_second_on_a_cluster(prompts: Sequence[str], folder: Path, layers: Sequence[int]) -> float:
    """Of a Ray cluster of this machine with one engine of one thread for each core, once all of them work.

    Engines are loaded by each run, so that the first third of the shards is not counted. They end their shards nearly
    together, so that the clock starts after as many shards of each.
    """
    from streamtap.harvest.cluster import run_on_cluster

    told: list[tuple[float, int]] = []
    run_on_cluster(
        lambda tokenizer: read_prompts(prompts, tokenizer),
        folder,
        HarvestAsk(layers=list(layers), shard_size=SHARD_PROMPTS),
        engine=ModelSource("demo", {"dtype": "float32", "device": "cpu"}),
        address="local",
        cpus_per_engine=1,
        on_progress=lambda progress: told.append((time.perf_counter(), progress.tokens_done)),
    )
    cores = os.cpu_count() or 1
    (begun, before), (ended, after) = told[max(1, len(told) // 3 // cores) * cores - 1], told[-1]
    return (after - before) / (ended - begun)
