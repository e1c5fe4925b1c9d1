"""Rows of a fake completion: those of ``FakeEngine``, steered, at the positions that were asked for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from streamtap.completion import CaptureAsk, CapturedPositions, Rows, SteeringVector
from streamtap.testing.fake_engine import FakeEngine

RowsFault = Literal["missing_layer", "short", "nan"]
Floats = NDArray[np.float32]


def captured(
    engine: FakeEngine, ask: CaptureAsk, steering: Sequence[SteeringVector], prompt: Sequence[int], new: Sequence[int]
) -> Rows:
    """Rows of one sequence of ``prompt`` and ``new`` tokens, the last of which was never fed back."""
    ids = np.array([*prompt, *new[:-1]], np.int32)
    positions = positions_of(ask.positions, len(prompt), len(ids))
    dtype = ml_dtypes.bfloat16 if ask.dtype == "bfloat16" else np.float32
    layers = [_steered(engine, ids, layer, steering)[positions].astype(dtype) for layer in ask.layers]
    return Rows(ask.layers, np.stack(layers), positions, ids[positions])


def positions_of(asked: CapturedPositions, n_prompt: int, n_tokens: int) -> NDArray[np.int32]:
    """The positions, int32 ascending, that have a row."""
    places = np.arange(n_tokens, dtype=np.int32)
    if asked == "all":
        return places
    if asked == "last":
        return places[-1:]
    if asked == "prompt":
        return places[:n_prompt]
    if asked == "generated":
        return places[n_prompt:]
    return np.array(sorted({place for place in asked if place < n_tokens}), np.int32)


def broken(rows: Rows, fault: RowsFault) -> Rows:
    """The same rows as a failing engine would give them: without the last layer, the last row, or with a NaN."""
    if fault == "missing_layer":
        return Rows(rows.layers[:-1], rows.values[:-1], rows.positions, rows.token_ids)
    if fault == "short":
        return Rows(rows.layers, rows.values[:, :-1], rows.positions[:-1], rows.token_ids[:-1])
    values = rows.values.copy()
    values[-1, -1, -1] = np.nan
    return Rows(rows.layers, values, rows.positions, rows.token_ids)


def _steered(engine: FakeEngine, ids: NDArray[np.int32], layer: int, steering: Sequence[SteeringVector]) -> Floats:
    rows: Floats = engine.rows(ids, layer).astype(np.float32)
    for vector in steering:
        if layer in vector.layers and vector.scale != 0:
            for places, direction in _directions(vector, vector.layers.index(layer), len(ids)):
                rows[places] += _change(rows[places], direction, vector)
    return rows


def _directions(vector: SteeringVector, place: int, n_tokens: int) -> Iterator[tuple[Any, Floats]]:
    """Where the vector acts, and with what: [hidden], or [positions, hidden]."""
    values = vector.vectors[place]
    if vector.spans is not None:
        yield from ((slice(*span), values) for span in vector.spans)
    elif values.ndim == 1:
        yield slice(None), values
    else:
        positions = np.arange(len(values)) if vector.positions is None else np.array(vector.positions)
        reached = positions < n_tokens
        yield positions[reached], values[reached]


def _change(rows: Floats, direction: Floats, vector: SteeringVector) -> Floats:
    # A scale out of range is the caller's wish, and what comes of it is checked later.
    with np.errstate(over="ignore", invalid="ignore"):
        change = np.broadcast_to(np.float32(vector.scale) * direction, rows.shape)
        if not vector.norm_match:
            return change
        own, norms = (np.linalg.norm(each, axis=-1, keepdims=True) for each in (direction, rows))
        return np.asarray(change * norms / (own + 1e-6), np.float32)
