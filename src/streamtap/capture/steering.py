"""Add directions to the residual stream at a block's output, position by position.

The arithmetic is the contract's: ``h + scale * v``, or with ``norm_match``
``h + scale * v * |h| / (|v| + 1e-6)`` per token, with norms in float32 over the whole stream. It is done in
float32 and rounded once to the stream's dtype. A scale of 0 touches nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from streamtap.completion import SteeringVector
from streamtap.errors import InvalidInput

_NORM_FLOOR = 1e-6


@dataclass(frozen=True)
class _Push:
    """One vector at one layer: ``vectors`` [hidden], or [P, hidden] for the ``positions`` of length P."""

    vectors: torch.Tensor
    scale: float
    norm_match: bool
    positions: tuple[int, ...] | None
    spans: tuple[tuple[int, int], ...] | None


class Steering:
    """The vectors of one request, in the order in which they act, ready on the model's device.

    Raises:
        InvalidInput: a layer or a width that the model does not have, or parts that do not fit each other.
    """

    def __init__(self, vectors: Sequence[SteeringVector], n_layers: int, hidden: int, device: torch.device) -> None:
        self._pushes: dict[int, list[_Push]] = {}
        for number, vector in enumerate(vectors):
            _check(vector, number, n_layers, hidden)
            if vector.scale == 0:
                continue  # an exact identity: not even a negative zero may change
            for place, layer in enumerate(vector.layers):
                values = torch.tensor(np.asarray(vector.vectors[place], np.float32), device=device)
                push = _Push(values, vector.scale, vector.norm_match, _positions(vector), vector.spans)
                self._pushes.setdefault(layer, []).append(push)

    @property
    def layers(self) -> frozenset[int]:
        """Layers that some vector acts on."""
        return frozenset(self._pushes)

    def apply(self, layer: int, rows: torch.Tensor, first: int) -> None:
        """Steer ``rows`` [tokens, hidden] in place; ``first`` is the position of the first of them."""
        for push in self._pushes.get(layer, ()):
            places, vectors = _where(push, first, rows)
            if places is None:
                rows.copy_(_pushed(rows, vectors, push))
            elif len(places):
                rows[places] = _pushed(rows[places], vectors, push)


def _check(vector: SteeringVector, number: int, n_layers: int, hidden: int) -> None:
    _check_parts(vector, number)
    beyond = [layer for layer in vector.layers if not 0 <= layer < n_layers]
    if beyond:
        raise InvalidInput(
            f"steering vector {number} names layer {beyond[0]}; the model's layers are 0 to {n_layers - 1}."
        )
    width = np.shape(vector.vectors)[-1]
    if width != hidden:
        raise InvalidInput(f"steering vector {number} has width {width}; the model's hidden size is {hidden}.")


def _check_parts(vector: SteeringVector, number: int) -> None:
    """Whether the parts fit each other; a pass of many requests would find out too late."""
    shape = np.shape(vector.vectors)
    if len(shape) not in (2, 3) or shape[0] != len(vector.layers):
        raise InvalidInput(
            f"steering vector {number} must be [{len(vector.layers)} layers, hidden] or [layers, positions, hidden]; "
            f"got {list(shape)}."
        )
    if not (math.isfinite(vector.scale) and np.isfinite(vector.vectors).all()):
        raise InvalidInput(f"steering vector {number} or its scale holds NaN or infinity; every value must be finite.")
    places = vector.positions
    one_each = len(shape) == 3 and len(set(places or ())) == len(places or ()) == shape[1]
    if places is not None and not (one_each and min(places) >= 0):
        raise InvalidInput(
            f"steering vector {number} of shape {list(shape)} takes as many positions as it has vectors a layer, each "
            f"once and 0 or more; got {len(places)}."
        )
    if vector.spans is not None and len(shape) == 3:
        raise InvalidInput(f"steering vector {number} has spans, which go with [layers, hidden]; got {list(shape)}.")


def _positions(vector: SteeringVector) -> tuple[int, ...] | None:
    if vector.vectors.ndim == 3 and vector.positions is None:
        return tuple(range(vector.vectors.shape[1]))
    return vector.positions


def _where(push: _Push, first: int, rows: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
    """The rows that ``push`` acts on, None for all, and the vectors [hidden] or [rows, hidden] for them."""
    stop = first + rows.shape[0]
    vectors = push.vectors.to(rows.device)  # a model may be spread over several
    if push.positions is not None:
        hits = [(place, position - first) for place, position in enumerate(push.positions) if first <= position < stop]
        mine = torch.tensor([place for place, _ in hits], dtype=torch.long, device=rows.device)
        return torch.tensor([row for _, row in hits], dtype=torch.long, device=rows.device), vectors[mine]
    if push.spans is not None:
        inside = [row for a, b in push.spans for row in range(max(a, first) - first, min(b, stop) - first)]
        return torch.tensor(inside, dtype=torch.long, device=rows.device), vectors
    return None, vectors


def _pushed(rows: torch.Tensor, vectors: torch.Tensor, push: _Push) -> torch.Tensor:
    wide = rows.double() if rows.dtype == torch.float64 else rows.float()
    moved = wide + _strength(wide, vectors, push) * vectors.to(wide.dtype)
    return moved.to(rows.dtype)


def _strength(rows: torch.Tensor, vectors: torch.Tensor, push: _Push) -> torch.Tensor | float:
    if not push.norm_match:
        return push.scale
    norms = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=torch.float32)
    own = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    strength: torch.Tensor = push.scale * norms / (own + _NORM_FLOOR)
    return strength.to(rows.dtype)
