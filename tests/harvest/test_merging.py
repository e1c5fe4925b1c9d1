from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from streamtap.harvest.merging import InOrder
from streamtap.harvest.record import ShardRecord, record_name
from streamtap.harvested.folder_place import FolderPlace
from streamtap.harvested.manifest import ShardEntry
from streamtap.harvested.statistics import RowSums


def _records(count: int) -> list[ShardRecord]:
    rng = np.random.default_rng(0)
    entries = [ShardEntry(f"shard_{i:05d}.safetensors", "00", 1, (i,), (), f"digest {i}") for i in range(count)]
    rows = [rng.normal(size=(2, 5, 3)).astype(np.float32) * 10 ** rng.uniform(-3, 3) for _ in range(count)]
    return [
        ShardRecord(i, entry, RowSums.of(each), (), i + 1, {})
        for i, (entry, each) in enumerate(zip(entries, rows, strict=True))
    ]


@pytest.fixture
def place(tmp_path: Path) -> FolderPlace:
    return FolderPlace(tmp_path / "run")


@pytest.mark.parametrize("most_held", [0, 1, 64])
def test_any_order_gives_the_bits_of_the_right_one(place: FolderPlace, most_held: int) -> None:
    records = _records(20)
    for record in records:
        place.put(record_name(record.number), record.to_bytes())
    straight, shuffled = InOrder(place), InOrder(place, most_held=most_held)
    order = random.Random(7).sample(records, len(records))

    for record in records:
        straight.take(record)
    for record in order:
        shuffled.take(record)

    one, other = straight.totals.sums, shuffled.totals.sums
    assert one is not None
    assert other is not None
    assert one.count == other.count == 100
    assert one.mean.tobytes() == other.mean.tobytes()
    assert one.squares.tobytes() == other.squares.tobytes()
    assert one.norms.tobytes() == other.norms.tobytes()
    assert shuffled.totals.shards == [record.entry for record in records]
    assert shuffled.totals.n_tokens == sum(range(1, 21))


def test_order_matters_to_the_bits() -> None:
    """Else the test above could not fail."""
    records = _records(20)
    forth, back = records[0].sums, records[-1].sums
    for record in records[1:]:
        forth = forth.merged(record.sums)
    for record in records[-2::-1]:
        back = back.merged(record.sums)

    assert forth.mean.tobytes() != back.mean.tobytes()


def test_records_that_wait_for_a_slow_shard_are_not_all_held(place: FolderPlace) -> None:
    records = _records(10)
    for record in records:
        place.put(record_name(record.number), record.to_bytes())
    merging = InOrder(place, most_held=2)

    for record in records[1:]:
        merging.take(record)

    assert sum(each is not None for each in merging._early.values()) == 2
    assert merging.totals.shards == []
    merging.take(records[0])
    assert len(merging.totals.shards) == 10
    assert merging._early == {}
