"""Streams in the worker processes of a ``DataLoader``: each row once, and gone on with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from streamtap.errors import HarvestMismatch
from streamtap.harvest.stream import ActivationStream
from streamtap.harvested.reader import HarvestedRun

SMALL: dict[str, Any] = {"batch_rows": 16, "shuffle_rows": 128}


def rows_of(batches: Iterable[torch.Tensor]) -> list[bytes]:
    return [row.numpy().tobytes() for batch in batches for row in batch]


def expected(run: HarvestedRun, layer: int) -> Counter[bytes]:
    return Counter(row.tobytes() for row in run.activations(layers=layer).acts[layer])


def values(batches: list[Any]) -> list[list[float]]:
    return [batch.flatten().tolist() for batch in batches]


def test_workers_share_the_rows(runs: Any) -> None:
    run = runs()
    stream = ActivationStream(run, layers=[1], **SMALL)
    loader = DataLoader(stream, batch_size=None, num_workers=2)
    first = list(loader)
    assert Counter(rows_of(first)) == expected(run, 1)

    taken = 9
    stream.load_state_dict(stream.state_dict(batches=taken, workers=2))
    assert values(list(loader)) == values(first)[taken:]
    stream.set_epoch(1)
    assert values(list(loader)) != values(first)


def test_the_last_batches_of_uneven_workers_are_gone_on_with(harvest: Any, tmp_path: Path) -> None:
    """One worker has a prompt of many rows, so that it gives alone in the end."""
    run = harvest(tmp_path, ["a" * 60, "b", "c" * 9], shard_size=1)
    stream = ActivationStream(run, layers=[1], batch_rows=4, shuffle_rows=32)
    loader = DataLoader(stream, batch_size=None, num_workers=2)
    every = values(list(loader))
    for taken in (1, len(every) - 3, len(every)):
        stream.load_state_dict(stream.state_dict(batches=taken, workers=2))
        assert values(list(loader)) == every[taken:]


def test_a_state_with_other_workers_is_refused(runs: Any) -> None:
    stream = ActivationStream(runs(), layers=[1], **SMALL)
    stream.load_state_dict(stream.state_dict(batches=3, workers=2))
    with pytest.raises(HarvestMismatch, match="2 workers"):
        list(stream)


def test_a_lock_that_was_held_at_the_fork_stops_no_worker(runs: Any) -> None:
    run = runs()
    stream = ActivationStream(run, layers=[1], **SMALL)
    with run._shelving:  # as a thread that reads in this process may hold it at any moment
        loader = iter(DataLoader(stream, batch_size=None, num_workers=1, timeout=20))
    assert Counter(rows_of(loader)) == expected(run, 1)


def test_workers_that_live_on_learn_of_the_epoch(runs: Any) -> None:
    stream = ActivationStream(runs(), layers=[1], **SMALL)
    loader = DataLoader(stream, batch_size=None, num_workers=2, persistent_workers=True)
    first, again = values(list(loader)), values(list(loader))
    stream.set_epoch(1)
    other = values(list(loader))

    assert first == again
    assert sorted(chain.from_iterable(other)) == sorted(chain.from_iterable(first))
    assert other != first


class _Told(IterableDataset):  # type: ignore[type-arg]
    """Gives the state of a stream after each of its batches, as loaders that ask their workers see it."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __iter__(self) -> Any:
        for batch in self.stream:
            yield self.stream.state_dict(), batch


def test_a_worker_tells_a_state_of_its_own(runs: Any) -> None:
    stream = ActivationStream(runs(), layers=[1], **SMALL)
    states = [state for state, _ in DataLoader(_Told(stream), batch_size=None, num_workers=2)]

    assert [(state["worker"], state["batches"]) for state in states[:4]] == [(0, 1), (1, 1), (0, 2), (1, 2)]
    assert {state["workers"] for state in states} == {2}
    with pytest.raises(HarvestMismatch, match="worker of 2"):
        stream.load_state_dict(states[2])
