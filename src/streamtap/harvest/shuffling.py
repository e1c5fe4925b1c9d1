"""Rows in the order of a pass: one buffer, from which a block goes as the next one comes into the places left free."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamtap.harvest.stream_order import Order

Array = NDArray[Any]
Ints = NDArray[np.int64]


def shuffled(
    order: Order, pieces: Iterator[Sequence[Array]], like: Sequence[Array], first_batch: int = 0
) -> Iterator[list[Array]]:
    """The batches of a pass from ``first_batch`` on, each one array [rows, width] a layer.

    Args:
        order: Of the pass.
        pieces: Rows of the order's units, in its order, from ``first_row(order, first_batch)`` on.
        like: An array [any, width] a layer, of the dtype of its rows.
        first_batch: How many of the pass were given before.
    """
    block = order.block_of(first_batch)
    source = _Incoming(pieces, like, _n_rows(order, block))
    places: Ints = np.arange(_n_rows(order, block))
    source.put(places)
    given = (first_batch - order.first_batch(block)) * order.batch_rows
    while len(places):
        leaving = places[order.permutation(block)]
        block += 1
        places, filled = np.empty(_n_rows(order, block), np.int64), 0
        for start in range(0, len(leaving), order.batch_rows):
            free = leaving[start : start + order.batch_rows]
            if start >= given:
                yield source.take(free)
            # No block is larger than the one before, so that its rows find room as these go.
            room = free[: len(places) - filled]
            source.put(room)
            places[filled : filled + len(room)] = room
            filled += len(room)
        given = 0


def first_row(order: Order, first_batch: int) -> int:
    """The row, counted in the order of reading, with which the block of ``first_batch`` begins."""
    return order.block_rows(order.block_of(first_batch))[0]


def _n_rows(order: Order, block: int) -> int:
    start, stop = order.block_rows(block)
    return stop - start


class _Incoming:
    """The buffer, ``n_rows`` of each layer, and the pieces that go into it."""

    def __init__(self, pieces: Iterator[Sequence[Array]], like: Sequence[Array], n_rows: int) -> None:
        self._pieces = pieces
        self._buffers = [np.empty((n_rows, each.shape[1]), each.dtype) for each in like]
        self._left: Sequence[Array] = [each[:0] for each in like]

    def put(self, places: Ints) -> None:
        """Put the next rows at these places of the buffer."""
        while len(places):
            if not len(self._left[0]):
                self._left = next(self._pieces)
            count = min(len(places), len(self._left[0]))
            for buffer, rows in zip(self._buffers, self._left, strict=True):
                buffer[places[:count]] = rows[:count]
            self._left = [rows[count:] for rows in self._left]
            places = places[count:]

    def take(self, places: Ints) -> list[Array]:
        """The rows at these places."""
        return [buffer.take(places, axis=0) for buffer in self._buffers]
