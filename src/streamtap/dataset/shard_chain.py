"""Rows that come in blocks, cut into the shards that a plan says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamtap.dataset.manifest import Shard
from streamtap.dataset.outbox import OpenShard, Outbox

Array = NDArray[Any]


class ShardChain:
    """Fills one shard file after the other.

    Args:
        outbox: Takes each file once it is whole.
        paths: One a shard.
        shards: How many rows each holds.
        kind: Name, dtype and width of the tensor in each.
    """

    def __init__(
        self, outbox: Outbox, paths: Sequence[str], shards: Sequence[Shard], kind: tuple[str, np.dtype[Any], int]
    ) -> None:
        self._outbox, self._kind = outbox, kind
        self._coming = list(zip(paths, [shard.rows for shard in shards], strict=True))
        self._open: OpenShard | None = None
        self._left = 0

    def write(self, rows: Array) -> None:
        """Append rows [some, width], over as many shards as they fill."""
        while len(rows):
            if self._open is None:
                self._begin()
            assert self._open is not None
            self._open.write(rows[: self._left])
            rows, self._left = rows[self._left :], max(0, self._left - len(rows))
            if self._left == 0:
                self._open.finish()
                self._open = None

    def close(self) -> None:
        """Close a file that was left in the middle; it is not sent."""
        if self._open is not None:
            self._open.abandon()

    def _begin(self) -> None:
        path, self._left = self._coming.pop(0)
        key, dtype, width = self._kind
        self._open = self._outbox.shard(path, {key: (dtype, (self._left, width))})
