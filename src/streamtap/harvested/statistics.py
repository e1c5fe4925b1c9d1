"""Mean, standard deviation and mean norm of rows, summed in float64 and merged in the order of the shards.

Merging is that of Chan, Golub and LeVeque (1979), which does not lose what a difference of large sums would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Wide = NDArray[np.float64]
#: Values picked and widened in one go, so that the copies stay small.
_PIECE_VALUES = 1 << 20


@dataclass(frozen=True)
class RowSums:
    """What is known of ``count`` rows: ``mean`` and ``squares`` [layers, width], ``norms`` [layers]; float64.

    ``squares`` are squared distances from the mean, summed; ``norms`` are lengths of rows, summed.
    """

    count: int
    mean: Wide
    squares: Wide
    norms: Wide

    @classmethod
    def nothing(cls, n_layers: int, width: int) -> RowSums:
        """Of no rows."""
        return cls(0, np.zeros((n_layers, width)), np.zeros((n_layers, width)), np.zeros(n_layers))

    @classmethod
    def of(cls, layers: Array | Sequence[Array], places: NDArray[np.integer[Any]] | None = None) -> RowSums:
        """Of the rows of each layer, [rows, width]; only of those at ``places`` [picked], where that is given."""
        n_rows, width = layers[0].shape
        picked = np.arange(n_rows) if places is None else places
        sums = cls.nothing(len(layers), width)
        step = max(1, _PIECE_VALUES // max(1, len(layers) * width))
        for start in range(0, len(picked), step):
            piece = picked[start : start + step]
            sums = sums.merged(cls._of_piece(np.stack([rows[piece] for rows in layers]).astype(np.float64)))
        return sums

    @classmethod
    def _of_piece(cls, wide: Wide) -> RowSums:
        mean = wide.mean(axis=1)
        norms = np.sqrt(np.einsum("lrw,lrw->lr", wide, wide)).sum(axis=1)
        wide -= mean[:, None]
        return cls(wide.shape[1], mean, np.einsum("lrw,lrw->lw", wide, wide), norms)

    def merged(self, other: RowSums) -> RowSums:
        """Of the rows of both; in floating point the order matters, so whoever wants equal bits keeps one."""
        count = self.count + other.count
        if not other.count:
            return self
        if not self.count:
            return other
        apart = other.mean - self.mean
        return RowSums(
            count,
            self.mean + apart * (other.count / count),
            self.squares + other.squares + apart**2 * (self.count * other.count / count),
            self.norms + other.norms,
        )

    @property
    def std(self) -> Wide:
        """Standard deviation of the population [layers, width]; zero of no rows."""
        spread: Wide = np.sqrt(self.squares / max(1, self.count))
        return spread

    @property
    def mean_norm(self) -> Wide:
        """Mean length of a row [layers]; zero of no rows."""
        lengths: Wide = self.norms / max(1, self.count)
        return lengths
