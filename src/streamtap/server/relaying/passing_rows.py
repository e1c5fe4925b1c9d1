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
        chosen: Which rows of a layer go on, bool [rows]; None is every one. The others are looked at like them.
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
        self._place = self._row = 0
        self._alive = False
        self._held = b""

    def take(self, piece: bytes) -> None:
        """Take the next bytes.

        Raises:
            CaptureMissed: a value is not finite, or a layer is only zeros over several rows, whichever go on.
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
        self._check_finite(values)
        self._alive = self._alive or bool(values.any())
        until = self._row + len(values)
        kept = values if self._chosen is None else values[self._chosen[self._row : until]]
        self._row = until
        if len(kept):
            self._go_on(kept)
        if self._row == self._rows:
            self._end_layer()

    def _go_on(self, kept: Array) -> None:
        if self._dtype != self._wanted:
            with np.errstate(all="ignore"):  # what the cast makes of them is looked at next
                kept = kept.astype(self._wanted)
            self._check_finite(kept)
        if self._give is not None:
            self._give(kept)

    def _check_finite(self, values: Array) -> None:
        if not is_finite(values):
            raise self._not_finite(self._layers[self._place])

    def _end_layer(self) -> None:
        # A token that stands alone may have an embedding of zero, as padding's often is; every position came.
        if self._rows > 1 and not self._alive and not self._steered:
            layer = self._layers[self._place]
            raise CaptureMissed(
                f"block {layer} of the model's engine put out only zeros, which no working device gives.", layer=layer
            )
        self._place, self._row, self._alive = self._place + 1, 0, False

    def _not_finite(self, layer: int) -> CaptureMissed | SteeringNotFinite:
        if self._steered:
            return SteeringNotFinite(
                f"block {layer} put out a value that is not finite under the steering vectors of this request; lower "
                "their scale."
            )
        return CaptureMissed(f"block {layer} of the model's engine put out a value that is not finite.", layer=layer)
