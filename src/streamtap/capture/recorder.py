"""Record the chosen rows of one forward pass, pooled on the device, and prove that none is missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from streamtap.capture.arrays import stack_on_host
from streamtap.capture.narrowing import Narrowing
from streamtap.errors import CaptureMissed

#: Poolings that need every chosen row of the pass; the others pick one row each beforehand.
REDUCED = ("mean", "max")


@dataclass(frozen=True)
class PassLayout:
    """Where the real tokens and the chosen rows of one right-padded pass lie.

    ``lengths`` are the real tokens of each sequence in this pass; ``chosen[b]`` are the
    positions of sequence b, counted within the pass, that have a row; ``names`` are the
    prompts' places in the caller's list, for errors; ``start`` is the position at which the
    pass begins.
    """

    lengths: tuple[int, ...]
    chosen: tuple[NDArray[np.int32], ...]
    names: tuple[int, ...]
    start: int = 0

    @property
    def width(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.lengths)

    @cached_property
    def flat_rows(self) -> NDArray[np.int64]:
        """The chosen rows as places in [batch * positions]."""
        rows = [b * self.width + each.astype(np.int64) for b, each in enumerate(self.chosen)]
        return np.concatenate(rows) if rows else np.zeros(0, np.int64)

    @cached_property
    def chosen_mask(self) -> NDArray[np.bool_]:
        """The chosen rows as a mask [batch, positions]."""
        return _mask(self.chosen, self.width)

    @cached_property
    def real_mask(self) -> NDArray[np.bool_]:
        """The real tokens as a mask [batch, positions]."""
        return np.arange(self.width)[None, :] < np.asarray(self.lengths)[:, None]


@dataclass
class Recorder:
    """Reads one pass: rows [rows, hidden] per layer, or sums and maxima [batch, hidden] where pooling reduces.

    ``narrow`` is what becomes of rows before they are copied; not of sums and maxima, which are not whole yet.
    """

    layout: PassLayout
    layers: Sequence[int]
    hidden: int
    pooling: str
    narrow: Narrowing | None = None
    dtype: torch.dtype = torch.float32
    _rows: dict[int, torch.Tensor] = field(default_factory=dict)
    _norms: dict[int, torch.Tensor] = field(default_factory=dict)
    _on: dict[torch.device, torch.Tensor] = field(default_factory=dict)

    def read(self, layer: int, stream: torch.Tensor) -> None:
        """Take what is asked for from ``stream`` [batch, positions, hidden], a block's output.

        Raises:
            CaptureMissed: the block fired twice, or its output has another shape than the pass.
        """
        expected = (len(self.layout.lengths), self.layout.width, self.hidden)
        if tuple(stream.shape) != expected:
            raise CaptureMissed(
                f"block {layer} put out shape {tuple(stream.shape)}; expected {expected} [batch, positions, hidden].",
                layer=layer,
            )
        if layer in self._norms:
            raise CaptureMissed(f"block {layer} fired twice in one pass; expected once.", layer=layer)
        stream = stream.detach()
        self.dtype = stream.dtype
        # One number per position shows NaN, infinity and dead layers without a wait for the device.
        self._norms[layer] = torch.linalg.vector_norm(stream, 1, dim=-1, dtype=_wide(stream.dtype))
        self._rows[layer] = self._take(stream)

    def finish(self) -> dict[int, torch.Tensor]:
        """The rows of every layer, on the host: one copy for all of them.

        Raises:
            CaptureMissed: a block did not fire, or a real position is not finite or a layer all zero.
        """
        for layer in self.layers:
            if layer not in self._norms:
                raise CaptureMissed(f"block {layer} fired 0 of 1 times in the pass; nothing was read.", layer=layer)
        self._check(stack_on_host([self._norms[layer] for layer in self.layers]).numpy())
        stacked = stack_on_host([self._rows[layer] for layer in self.layers])
        return {layer: stacked[i] for i, layer in enumerate(self.layers)}

    def _take(self, stream: torch.Tensor) -> torch.Tensor:
        if self.pooling not in REDUCED:
            places = self._device_copy(self.layout.flat_rows, stream.device)
            rows = stream.reshape(-1, self.hidden).index_select(0, places)
            return rows if self.narrow is None else self.narrow(rows)
        mask = self._device_copy(self.layout.chosen_mask, stream.device).unsqueeze(-1)
        if self.pooling == "max":
            return torch.where(mask, stream, float("-inf")).amax(dim=1)
        return torch.where(mask, stream, 0).sum(dim=1, dtype=_wide(stream.dtype))

    def _device_copy(self, array: NDArray[Any], device: torch.device) -> torch.Tensor:
        if device not in self._on:
            self._on[device] = torch.from_numpy(array).to(device)
        return self._on[device]

    def _check(self, norms: NDArray[np.floating[Any]]) -> None:
        """``norms`` is [layers, batch, positions]."""
        real = self.layout.real_mask
        bad = ~np.isfinite(norms) & real
        if bad.any():
            place, b, position = np.argwhere(bad)[0]
            raise CaptureMissed(
                f"block {self.layers[place]} put out a value that is not finite, first at prompt "
                f"{self.layout.names[b]}, position {position + self.layout.start}.",
                layer=self.layers[place],
            )
        dead = ~((norms != 0) & real).any(axis=(1, 2))
        if dead.any():
            layer = self.layers[int(np.argmax(dead))]
            raise CaptureMissed(f"block {layer} put out only zeros, which no working device gives.", layer=layer)


def _mask(chosen: Sequence[NDArray[np.int32]], width: int) -> NDArray[np.bool_]:
    mask = np.zeros((len(chosen), width), bool)
    for b, places in enumerate(chosen):
        mask[b, places] = True
    return mask


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
