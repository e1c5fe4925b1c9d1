"""Gather the captured rows of one sequence over its passes, and prove that they are whole."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from streamtap.capture.arrays import to_numpy
from streamtap.completion import CaptureAsk, Rows
from streamtap.errors import CaptureMissed, SteeringNotFinite, StreamtapError

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class RowCollector:
    """Rows [layers, rows, hidden] of one sequence, taken from each pass in the dtype that was asked for.

    Args:
        ask: Layers, positions and dtype.
        prompt_tokens: Where the generated positions begin.
        hidden: Width of a row.
        steered: Whether a value that is not finite is the caller's doing.
    """

    def __init__(self, ask: CaptureAsk, prompt_tokens: int, hidden: int, *, steered: bool) -> None:
        self.ask = ask
        self._places = {layer: place for place, layer in enumerate(ask.layers)}
        self._prompt_tokens, self._hidden, self._steered = prompt_tokens, hidden, steered
        self._chosen = frozenset(ask.positions) if isinstance(ask.positions, tuple) else frozenset()
        self._parts: list[torch.Tensor] = []
        self._positions: list[int] = []
        self._open: torch.Tensor | None = None
        self._now: list[int] = []
        self._seen: set[int] = set()

    def begin(self, first: int, stop: int, device: torch.device) -> None:
        """A pass over positions ``first`` to ``stop`` is about to run."""
        self._now = self._wanted(first, stop)
        self._seen = set()
        shape = (len(self.ask.layers), len(self._now), self._hidden)
        self._open = torch.empty(shape, dtype=_DTYPES[self.ask.dtype], device=device)

    def see(self, layer: int, rows: torch.Tensor, first: int) -> None:
        """Take what is asked for from ``rows`` [tokens, hidden], whose first is position ``first``.

        Raises:
            CaptureMissed: the block fired twice, or put out another shape.
        """
        place = self._places.get(layer)
        if place is None or self._open is None:
            return
        if layer in self._seen or rows.shape[-1] != self._hidden:
            raise CaptureMissed(
                f"block {layer} fired twice in one pass or put out width {rows.shape[-1]}; expected once, with "
                f"{self._hidden}.",
                layer=layer,
            )
        self._seen.add(layer)
        if self._now and self._now[-1] - self._now[0] + 1 == len(self._now):
            self._open[place] = rows[self._now[0] - first : self._now[-1] - first + 1]
        elif self._now:
            self._open[place] = rows[torch.tensor(self._now, device=rows.device) - first]

    def end(self) -> None:
        """The pass is over: keep its rows.

        Raises:
            CaptureMissed: a block did not fire, or gave a value that is not finite, or zeros alone.
            SteeringNotFinite: a value is not finite, and a steering vector may have made it so.
        """
        missed = [layer for layer in self.ask.layers if layer not in self._seen]
        if missed:
            raise CaptureMissed(f"block {missed[0]} fired 0 of 1 times in the pass; nothing was read.", layer=missed[0])
        rows, self._open = self._open, None
        if rows is None or not self._now:
            return
        self._check(rows)
        if self.ask.positions == "last":
            self._parts, self._positions = [], []
        self._parts.append(rows.cpu())
        self._positions += self._now

    def rows(self, token_ids: Sequence[int]) -> Rows:
        """Everything that was taken; ``token_ids`` are prompt and generated tokens."""
        empty = torch.empty((len(self.ask.layers), 0, self._hidden), dtype=_DTYPES[self.ask.dtype])
        values = self._parts[0] if len(self._parts) == 1 else torch.cat([empty, *self._parts], dim=1)
        positions = np.array(self._positions, np.int32)
        return Rows(self.ask.layers, to_numpy(values), positions, np.asarray(token_ids, np.int32)[positions])

    def _wanted(self, first: int, stop: int) -> list[int]:
        asked = self.ask.positions
        if asked == "last":
            return [stop - 1]
        if asked == "prompt":
            return list(range(first, min(stop, self._prompt_tokens)))
        if asked == "generated":
            return list(range(max(first, self._prompt_tokens), stop))
        if asked == "all":
            return list(range(first, stop))
        return [position for position in range(first, stop) if position in self._chosen]

    def _check(self, rows: torch.Tensor) -> None:
        # The largest magnitude of a layer shows NaN, infinity and a dead layer at once.
        for layer, peak in zip(self.ask.layers, rows.abs().amax(dim=(1, 2)).tolist(), strict=True):
            if not np.isfinite(peak):
                raise not_finite(f"block {layer}", layer, steered=self._steered)
            # A lone row may be that of a token whose embedding is zero, as padding's often is.
            if peak == 0 and len(self._now) > 1 and not self._steered:
                raise CaptureMissed(f"block {layer} put out only zeros, which no working device gives.", layer=layer)


def not_finite(what: str, layer: int, *, steered: bool) -> StreamtapError:
    """The error for values that are not finite: the caller's, where a vector steers, else the engine's."""
    if steered:
        return SteeringNotFinite(
            f"{what} put out a value that is not finite under the steering vectors of this request; lower their scale."
        )
    return CaptureMissed(f"{what} put out a value that is not finite.", layer=layer)
