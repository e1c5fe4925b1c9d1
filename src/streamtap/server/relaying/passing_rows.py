"""The values of one capture while they pass: looked at, chosen from and narrowed, a few rows at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamtap.codec import is_finite
from streamtap.errors import CaptureMissed, SteeringNotFinite

Array = NDArray[Any]


class PassingRows:
    """Takes the bytes of [layers, rows, hidden] values, layer after layer.

    Args:
        layers: Numbers of the layers, for what is said of them.
        shape: Of what comes: layers, rows, hidden.
        dtype: Of what comes.
        wanted: What goes on is cast to this.
        chosen: Which rows of a layer go on, bool [rows]; None is every one.
        steered: Whether a value that is not finite is the caller's doing.
        give: Is given what goes on, [some rows, hidden]; None where that is looked at alone.
    """

    def __init__(
        self,
        layers: tuple[int, ...],
        shape: tuple[int, int, int],
        dtype: np.dtype[Any],
        wanted: np.dtype[Any],
        *,
        chosen: NDArray[np.bool_] | None = None,
        steered: bool = False,
        give: Callable[[Array], None] | None = None,
    ) -> None:
        self._layers, self._rows, self._hidden = layers, shape[1], shape[2]
        self._dtype, self._wanted = dtype, wanted
        self._chosen, self._steered, self._give = chosen, steered, give
        self._place = self._row = self._seen = 0
        self._alive = False
        self._held = b""

    def take(self, piece: bytes) -> None:
        """Take the next bytes.

        Raises:
            CaptureMissed: a value is not finite, or a layer is only zeros over several rows.
            SteeringNotFinite: a value is not finite, and vectors may have made it so.
        """
        held = self._held + piece if self._held else piece
        width = self._dtype.itemsize * self._hidden
        count = len(held) // width
        self._held = held[count * width :]
        values = np.frombuffer(held, self._dtype, count * self._hidden).reshape(count, self._hidden)
        while len(values):
            now = values[: self._rows - self._row]
            self._take(now)
            values = values[len(now) :]

    def _take(self, values: Array) -> None:
        """Rows of one layer."""
        until = self._row + len(values)
        kept = values if self._chosen is None else values[self._chosen[self._row : until]]
        self._row = until
        if len(kept):
            with np.errstate(all="ignore"):  # what the cast makes of them is looked at next
                narrowed = kept.astype(self._wanted, copy=False)
            self._go_on(narrowed)
        if self._row == self._rows:
            self._end_layer()

    def _go_on(self, kept: Array) -> None:
        if not is_finite(kept):
            raise self._not_finite(self._layers[self._place])
        self._seen += len(kept)
        self._alive = self._alive or bool(kept.any())
        if self._give is not None:
            self._give(kept)

    def _end_layer(self) -> None:
        # A lone row may be that of a token whose embedding is zero, as padding's often is.
        if self._seen > 1 and not self._alive and not self._steered:
            layer = self._layers[self._place]
            raise CaptureMissed(
                f"block {layer} of the model's engine put out only zeros, which no working device gives.", layer=layer
            )
        self._place, self._row, self._seen, self._alive = self._place + 1, 0, 0, False

    def _not_finite(self, layer: int) -> CaptureMissed | SteeringNotFinite:
        if self._steered:
            return SteeringNotFinite(
                f"block {layer} put out a value that is not finite under the steering vectors of this request; lower "
                "their scale."
            )
        return CaptureMissed(f"block {layer} of the model's engine put out a value that is not finite.", layer=layer)
