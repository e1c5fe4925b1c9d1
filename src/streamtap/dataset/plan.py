"""Which rows go to which shard: worked out before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streamtap.dataset.index import Places
from streamtap.dataset.manifest import Shard
from streamtap.errors import InvalidInput
from streamtap.ragged import offsets_of, ranges

Ints = NDArray[np.int64]

#: A folder on the Hub takes 10 000 files; a few are left for what is not a shard.
MOST_FILES = 9_900


@dataclass(frozen=True)
class Layout:
    """Shards, and where each prompt's row lies.

    Where tokens have rows of their own, the first ``last_token_shards`` hold one row a prompt; ``others`` is where its
    other rows begin, and ``counts`` how many rows it has, int64 [prompts].
    """

    shards: tuple[Shard, ...]
    places: Places
    last_token_shards: int = 0
    others: Places | None = None
    counts: Ints | None = None

    def token_places(self, here: slice) -> tuple[Places, Ints]:
        """Where every token's row of some prompts lies, and offsets [some + 1]; it is worked out anew for each some."""
        assert self.others is not None
        assert self.counts is not None
        counts = self.counts[here]
        offsets = offsets_of(counts)
        shards, rows = np.repeat(self.others.shards[here], counts), ranges(self.others.rows[here], counts)
        ends = offsets[1:] - 1
        shards[ends], rows[ends] = self.places.shards[here], self.places.rows[here]
        return Places(shards, rows), offsets


def plan_pooled(n_prompts: int, row_bytes: int, shard_max_bytes: int) -> Layout:
    """One row a prompt, in the order given, as many a shard as fit.

    Raises:
        InvalidInput: shards that are to be smaller than a row.
    """
    if shard_max_bytes < row_bytes:
        raise InvalidInput(f"shard_max_bytes must hold at least one row of {row_bytes} bytes; got {shard_max_bytes}.")
    most = shard_max_bytes // row_bytes
    starts = range(0, n_prompts, most)
    shards = tuple(Shard(size, size) for size in (min(most, n_prompts - start) for start in starts))
    shard, row = np.divmod(np.arange(n_prompts, dtype=np.int64), most)
    return Layout(shards, Places(shard, row))


def plan_full(counts: Ints, row_bytes: int, shard_max_bytes: int) -> Layout:
    """Every row of every prompt: the last ones in shards of their own, then the others, a prompt never over two shards.

    Args:
        counts: Rows of each prompt, int64 [prompts], at least 1 each.
        row_bytes: Bytes of one row.
        shard_max_bytes: Size of a file; a single prompt that is longer has a larger one.

    Raises:
        InvalidInput: shards that are to be smaller than a row.
    """
    last = plan_pooled(len(counts), row_bytes, shard_max_bytes)
    first_number = len(last.shards)
    rest, others = _prompts_to_shards(counts - 1, shard_max_bytes // row_bytes)
    begin = Places(others.shards + first_number, others.rows)
    return Layout(last.shards + rest, last.places, first_number, begin, counts)


def check_files(count: Callable[[int], int], shard_max_bytes: int) -> None:
    """Refuse a size of shards that makes more files than a folder on the Hub may hold.

    Args:
        count: How many files a size makes.
        shard_max_bytes: The size.

    Raises:
        InvalidInput: it says what size of shards would do.
    """
    n_files = count(shard_max_bytes)
    if n_files <= MOST_FILES:
        return
    enough, there = shard_max_bytes, n_files
    # Rounding up a few rows for each layer may leave a few files too many, so it is tried.
    while there > MOST_FILES and enough < shard_max_bytes * n_files:
        enough = shard_max_bytes * -(-(enough // shard_max_bytes) * there // MOST_FILES)
        there = count(enough)
    advice = "fewer layers" if there > MOST_FILES else f"shard_max_bytes={enough}"
    raise InvalidInput(
        f"shard_max_bytes={shard_max_bytes} makes {n_files} files, and a folder on the Hub holds {MOST_FILES}; "
        f"{advice} would do."
    )


def _prompts_to_shards(counts: Ints, most_rows: int) -> tuple[tuple[Shard, ...], Places]:
    """Shards of whole prompts, and each prompt's shard and first row in it."""
    shards: list[Shard] = []
    number, first = np.zeros(len(counts), np.int64), np.zeros(len(counts), np.int64)
    prompts = rows = 0
    for place, count in enumerate(counts.tolist()):
        if rows and rows + count > most_rows:
            shards.append(Shard(prompts, rows))
            prompts = rows = 0
        number[place], first[place] = len(shards), rows
        prompts, rows = prompts + 1, rows + count
    if rows:
        shards.append(Shard(prompts, rows))
    return tuple(shards), Places(number, first)
