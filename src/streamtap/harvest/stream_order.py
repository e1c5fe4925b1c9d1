"""In which order a stream gives the rows of a run: pure, and worked out from counts of rows alone.

::

    shards ─► units (neighbouring prompts, read in one go) ─► permuted, dealt to the workers ─► blocks, permuted by row
    unit 7 | unit 2 | unit 9 | unit 0 | …
    └─ block 0 ──────┘└─ block 1 ─────┘       a batch is rows of one block, drawn from all of it

What is permuted is the numbers of rows, never the rows, so that any batch of a pass is known without those before it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from streamtap.ragged import blocks, offsets_of

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Units:
    """What is read in one go: prompts ``first`` to ``stop`` of a shard, counted within it; all int64 [units].

    ``rows`` is how many of their rows are wanted.
    """

    shards: Ints
    first: Ints
    stop: Ints
    rows: Ints


def plan_units(counts: Sequence[Ints], wanted: Sequence[Ints], most_rows: int | None) -> Units:
    """Units of at most ``most_rows`` rows, or of one prompt; None makes one of each shard.

    Args:
        counts: Rows of each prompt, one array [prompts] a shard.
        wanted: How many of these are wanted, in the same way.
        most_rows: See above.
    """
    found: list[tuple[int, int, int, int]] = []
    for shard, (held, kept) in enumerate(zip(counts, wanted, strict=True)):
        before = offsets_of(kept)
        stretches = [(0, len(held))] if most_rows is None else blocks(held, most_rows)
        found += [(shard, start, stop, int(before[stop] - before[start])) for start, stop in stretches]
    columns = np.array(found, np.int64).reshape(-1, 4).T
    return Units(*columns)


@dataclass(frozen=True, eq=False)
class Order:
    """One pass of one worker.

    Args:
        units: Numbers of its units, in the order in which they are read, int64 [units].
        rows: Wanted rows of each, int64 [units].
        batch_rows: Rows of a batch.
        block_batches: Batches of a block at most.
        seed: What its permutations are made of.
    """

    units: Ints
    rows: Ints
    batch_rows: int
    block_batches: int
    seed: tuple[int, ...]

    @classmethod
    def of(
        cls,
        units: Units,
        *,
        batch_rows: int,
        shuffle_rows: int,
        seed: int,
        epoch: int,
        worker: int = 0,
        workers: int = 1,
    ) -> Order:
        """That of worker ``worker`` of ``workers``, who share the units and the ``shuffle_rows``."""
        mine = np.random.default_rng((seed, epoch)).permutation(len(units.rows))[worker::workers]
        batches = max(1, -(-shuffle_rows // (batch_rows * workers)))
        return cls(mine, units.rows[mine], batch_rows, batches, (seed, epoch, worker, workers))

    @cached_property
    def offsets(self) -> Ints:
        """Rows before each unit and, at the end, of all: int64 [units + 1]."""
        return offsets_of(self.rows)

    @property
    def n_rows(self) -> int:
        """Rows of the pass."""
        return int(self.offsets[-1])

    @property
    def n_batches(self) -> int:
        """Batches of the pass; the last one may be short."""
        return -(-self.n_rows // self.batch_rows)

    @property
    def n_blocks(self) -> int:
        """Blocks of the pass, which are of one size, give or take a batch: no tail is left that mixes less."""
        return -(-self.n_batches // self.block_batches)

    def first_batch(self, block: int) -> int:
        """The number of a block's first batch; of the block after the last, that of all batches."""
        each, more = divmod(self.n_batches, max(1, self.n_blocks))
        return block * each + min(block, more)

    def block_of(self, batch: int) -> int:
        """The block that a batch is drawn from."""
        return bisect_right(range(1, self.n_blocks), batch, key=self.first_batch)

    def block_rows(self, block: int) -> tuple[int, int]:
        """A block's rows [start, stop), counted in the order of reading."""
        ends = (self.first_batch(number) * self.batch_rows for number in (block, block + 1))
        start, stop = (min(end, self.n_rows) for end in ends)
        return start, stop

    def permutation(self, block: int) -> Ints:
        """The order of a block's rows, counted from its first."""
        start, stop = self.block_rows(block)
        return np.random.default_rng((*self.seed, block)).permutation(stop - start)


def shares(n_batches: Sequence[int], taken: int) -> tuple[list[int], int]:
    """How many of ``taken`` batches each worker gave, and whose turn is next.

    They take turns, and one that has no more is passed over; ``n_batches`` is how many each has in all.
    """
    counts = np.asarray(n_batches, np.int64)
    rounds = range(int(counts.max(initial=0)) + 1)
    whole = bisect_right(rounds, taken, key=lambda turns: int(np.minimum(counts, turns).sum())) - 1
    given = np.minimum(counts, whole)
    going_on = np.flatnonzero(counts > whole)
    begun = taken - int(given.sum())
    given[going_on[:begun]] += 1
    return [int(each) for each in given], int(going_on[begun]) if len(going_on) else 0
