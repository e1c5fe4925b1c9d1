"""In which order a stream gives rows: each once, mixed over the whole block, and known without those before."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamtap.harvest.shuffling import first_row, shuffled
from streamtap.harvest.stream_order import Order, Units, plan_units, shares

SHARDS = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=6)


def units_of(*rows: int) -> Units:
    numbers = np.arange(len(rows))
    return Units(numbers, numbers * 0, numbers * 0 + 1, np.array(rows))


def order_of(units: Units, **options: int) -> Order:
    return Order.of(units, **{"batch_rows": 4, "shuffle_rows": 16, "seed": 0, "epoch": 0, **options})


def batches_of(order: Order, first: int = 0) -> list[np.ndarray]:
    """The batches of a pass over rows whose one value is their place in the order of reading."""
    row = first_row(order, first)
    every = np.arange(row, order.n_rows, dtype=np.int32)[:, None]
    # In pieces of uneven sizes, with an empty one among them.
    pieces = np.split(every, [0, *range(3, len(every), 7)])
    return [batch[0][:, 0] for batch in shuffled(order, iter([[each] for each in pieces]), [every[:0]], first)]


@settings(deadline=None)
@given(SHARDS, st.integers(1, 12))
def test_units_are_all_prompts_once(shards: list[list[int]], most: int) -> None:
    counts = [np.array(each) for each in shards]
    wanted = [each - (each > 3) for each in counts]
    units = plan_units(counts, wanted, most)

    told = [(s, i) for s, a, b in zip(units.shards, units.first, units.stop, strict=True) for i in range(a, b)]
    assert told == [(s, i) for s, each in enumerate(shards) for i in range(len(each))]
    for shard, first, stop, rows in zip(units.shards, units.first, units.stop, units.rows, strict=True):
        assert rows == wanted[shard][first:stop].sum()
        assert stop - first == 1 or counts[shard][first:stop].sum() <= most
    assert len(plan_units(counts, wanted, None).rows) == len(shards)


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=30),
    st.integers(1, 7),
    st.integers(1, 60),
    st.integers(1, 4),
    st.data(),
)
def test_a_pass_is_every_row_once_and_goes_on_from_anywhere(
    rows: list[int], batch_rows: int, shuffle_rows: int, workers: int, data: st.DataObject
) -> None:
    units = units_of(*rows)
    orders = [
        order_of(units, batch_rows=batch_rows, shuffle_rows=shuffle_rows, worker=worker, workers=workers)
        for worker in range(workers)
    ]
    assert sorted(unit for order in orders for unit in order.units.tolist()) == list(range(len(rows)))
    for order in orders:
        batches = batches_of(order)
        assert sorted(np.concatenate([np.zeros(0, int), *batches]).tolist()) == list(range(order.n_rows))
        assert len(batches) == order.n_batches
        assert all(len(batch) == batch_rows for batch in batches[:-1])
        first = data.draw(st.integers(0, max(0, order.n_batches - 1)))
        again = batches_of(order, first)
        assert [batch.tolist() for batch in again] == [batch.tolist() for batch in batches[first:]]


@settings(deadline=None)
@given(st.integers(1, 5000), st.integers(1, 50), st.integers(1, 400))
def test_blocks_are_alike_in_size_and_no_larger_than_the_buffer(n_rows: int, batch_rows: int, shuffle: int) -> None:
    order = order_of(units_of(n_rows), batch_rows=batch_rows, shuffle_rows=shuffle)
    ends = [order.block_rows(block) for block in range(order.n_blocks)]
    sizes = np.array([order.first_batch(block + 1) - order.first_batch(block) for block in range(order.n_blocks)])

    assert [start for start, _ in ends] == [0, *(stop for _, stop in ends[:-1])]
    assert ends[-1][1] == n_rows
    assert sizes.max() - sizes.min() <= 1
    assert np.all(np.diff(sizes) <= 0)
    assert sizes.max() * batch_rows < shuffle + batch_rows
    for block in range(order.n_blocks):
        for batch in (order.first_batch(block), order.first_batch(block + 1) - 1):
            assert order.block_of(batch) == block


def test_a_batch_is_drawn_from_all_of_its_block() -> None:
    """A shuffle of pairs, or of neighbours, leaves a row near where it was; here its place tells nothing."""
    order = order_of(units_of(*[64] * 256), batch_rows=256, shuffle_rows=4096)
    batches = batches_of(order)
    rows = np.concatenate(batches)
    assert order.n_blocks == 4
    for block in range(4):
        mine = rows[block * 4096 : (block + 1) * 4096]
        assert sorted(mine) == list(range(block * 4096, (block + 1) * 4096))
        # The correlation of a random order with the old one is 0, give or take 1 / sqrt(4096).
        assert abs(np.corrcoef(np.arange(4096), mine)[0, 1]) < 4 / 64
        assert abs(np.corrcoef(mine[:-1], mine[1:])[0, 1]) < 4 / 64
    # Of the 64 units of a block, 256 draws of 4096 without return leave out less than two; of 16 draws each, a few.
    met = [len(np.unique(batch // 64)) for batch in batches]
    assert min(met) >= 59
    # How often two rows that were neighbours still are: 2 of 4095 are expected in each block.
    assert (np.abs(np.diff(rows)) == 1).sum() < 30


def test_every_row_may_come_to_every_place_of_its_block() -> None:
    """Over many seeds, chi-square over places of a block of 16."""
    counts = np.zeros((16, 16))
    for seed in range(1600):
        rows = np.concatenate(batches_of(order_of(units_of(16), seed=seed)))
        counts[rows, np.arange(16)] += 1
    statistic = ((counts - 100) ** 2 / 100).sum()
    # 225 degrees of freedom: mean 225, standard deviation 21.
    assert statistic < 225 + 5 * 21.3


def test_epochs_seeds_and_workers_have_orders_of_their_own() -> None:
    units = units_of(*[5] * 40)
    kinds = [{}, {"epoch": 1}, {"seed": 1}, {"worker": 1, "workers": 2}, {"worker": 0, "workers": 2}]
    orders = [order_of(units, **kind) for kind in kinds]
    firsts = [np.concatenate(batches_of(order))[:20].tolist() for order in orders]

    assert len({tuple(each) for each in firsts}) == len(kinds)
    assert len({tuple(order.units[:20].tolist()) for order in orders}) == len(kinds)
    assert batches_of(order_of(units))[3].tolist() == batches_of(orders[0])[3].tolist()


@pytest.mark.parametrize("rows", [[1], [3], [0, 1, 0]])
def test_one_unit_with_less_than_a_batch_ends(rows: list[int]) -> None:
    order = order_of(units_of(*rows), shuffle_rows=1 << 17)
    assert [sorted(batch) for batch in batches_of(order)] == [list(range(sum(rows)))]


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.data())
def test_shares_are_those_of_workers_who_take_turns(counts: list[int], data: st.DataObject) -> None:
    taken = data.draw(st.integers(0, sum(counts)))
    left, given, turn = list(counts), [0] * len(counts), 0
    for _ in range(taken):
        while not left[turn % len(counts)]:
            turn += 1
        left[turn % len(counts)] -= 1
        given[turn % len(counts)] += 1
        turn += 1
    shared, following = shares(counts, taken)
    assert shared == given
    if any(left):
        while not left[turn % len(counts)]:
            turn += 1
        assert following == turn % len(counts)
