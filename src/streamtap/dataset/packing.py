"""Rows into shard files: read block after block, so that memory grows neither with the prompts nor with a shard."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamtap.dataset.contents import Contents, HiddenRows, LogitRows, Plan
from streamtap.dataset.manifest import Shard
from streamtap.dataset.names import LOGIT_IDS, LOGIT_VALUES, hidden_file, hidden_key, logits_file
from streamtap.dataset.outbox import Outbox
from streamtap.dataset.places import Advance
from streamtap.dataset.plan import Layout
from streamtap.dataset.shard_chain import ShardChain
from streamtap.errors import InvalidInput
from streamtap.ragged import blocks, offsets_of

Array = NDArray[Any]
Ints = NDArray[np.int64]

_BLOCK_BYTES = 32 << 20


def pack(contents: Contents, plan: Plan, outbox: Outbox, advance: Advance) -> None:
    """Write every shard file and hand it to the outbox.

    Raises:
        InvalidInput: rows that are not those announced.
        TransferFailed: a shard could not be sent.
    """
    rows = contents.hidden
    if rows is not None and plan.hidden is not None:
        offsets = offsets_of(np.ones(contents.n_prompts, np.int64) if rows.counts is None else rows.counts)
        _pack_hidden(rows, plan.hidden, offsets, outbox, advance)
    if contents.logits is not None and plan.logits is not None:
        _pack_logits(contents.logits, plan.logits, outbox, advance)


def _pack_hidden(rows: HiddenRows, layout: Layout, offsets: Ints, outbox: Outbox, advance: Advance) -> None:
    with closing(_blocks_ahead(rows, offsets)) as coming:
        for layer, some in groupby(coming, key=lambda block: block.layer):
            _pack_layer(rows, layer, some, layout, offsets, outbox, advance)


def _pack_layer(
    rows: HiddenRows,
    layer: int,
    some: Iterable[_Block],
    layout: Layout,
    offsets: Ints,
    outbox: Outbox,
    advance: Advance,
) -> None:
    kind = (hidden_key(layer), rows.dtype, rows.width)
    first = layout.last_token_shards if rows.counts is not None else len(layout.shards)
    ones = ShardChain(outbox, [hidden_file(layer, i) for i in range(first)], layout.shards[:first], kind)
    numbers = range(first, len(layout.shards))
    others = ShardChain(outbox, [hidden_file(layer, i) for i in numbers], layout.shards[first:], kind)
    with closing(ones), closing(others):
        for block in some:
            if rows.counts is None:
                ones.write(block.rows)
            else:
                ends = offsets[block.start + 1 : block.stop + 1] - offsets[block.start] - 1
                is_rest = np.ones(len(block.rows), np.bool_)
                is_rest[ends] = False
                ones.write(block.rows[ends])
                others.write(block.rows[is_rest])
            advance(block.rows.nbytes)


def _pack_logits(logits: LogitRows, layout: Layout, outbox: Outbox, advance: Advance) -> None:
    # The values of a whole file come before its ids, and a block is read for each; one that is the whole file once.
    read, start = lru_cache(1)(logits.read), 0
    for number, shard in enumerate(layout.shards):
        stretches = _logit_blocks(start, shard, logits.row_bytes)
        start += shard.prompts
        shape = (shard.rows, logits.k)
        tensors = {LOGIT_VALUES: (np.dtype(np.float32), shape), LOGIT_IDS: (np.dtype(np.int32), shape)}
        with outbox.shard(logits_file(number), tensors) as writer:
            for part in (0, 1):
                for block in stretches:
                    values = read(*block)[part]
                    writer.write(values)
                    advance(values.nbytes)


def _logit_blocks(start: int, shard: Shard, row_bytes: int) -> list[tuple[int, int]]:
    stop, most = start + shard.prompts, max(1, _BLOCK_BYTES // row_bytes)
    return [(first, min(first + most, stop)) for first in range(start, stop, most)]


@dataclass(frozen=True)
class _Block:
    """Rows [rows, width] of prompts [start, stop) at a layer."""

    layer: int
    start: int
    stop: int
    rows: Array


def _blocks_ahead(rows: HiddenRows, offsets: Ints) -> Generator[_Block, None, None]:
    """Layer after layer, block after block; the next one is read while the caller writes this one."""
    most = max(1, _BLOCK_BYTES // (rows.width * rows.dtype.itemsize))
    stretches = list(blocks(np.diff(offsets), most))
    wanted = [(layer, start, stop) for layer in rows.layers for start, stop in stretches]
    with ThreadPoolExecutor(1) as reader:
        coming = reader.submit(rows.read, *wanted[0])
        for (layer, start, stop), after in zip(wanted, [*wanted[1:], None], strict=True):
            block = coming.result()
            if after is not None:
                coming = reader.submit(rows.read, *after)
            shape = (int(offsets[stop] - offsets[start]), rows.width)
            if block.shape != shape:
                raise InvalidInput(
                    f"layer {layer} of prompts {start} to {stop - 1} must be {list(shape)}; got {list(block.shape)}."
                )
            yield _Block(layer, start, stop, block)
