"""A direction as the steering vector of a request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from streamtap.client.arrays import as_floats, as_ints
from streamtap.completion import SteeringVector
from streamtap.errors import InvalidInput
from streamtap.wire.steering import vector_body

Spans = Sequence[tuple[int, int]]


def steering_vector(
    direction: ArrayLike,
    layer: int | Sequence[int],
    scale: float = 1.0,
    *,
    norm_match: bool = False,
    positions: Sequence[int] | None = None,
    spans: Spans | None = None,
) -> dict[str, Any]:
    """One entry of ``apply_steering_vectors``: ``scale * direction`` is added to what block ``layer`` puts out.

    ``direction`` is a numpy array, a torch tensor or a list:

    - [hidden], or [layers, hidden] with a list of layers: at every position, or only at ``positions``, or only
      inside ``spans`` [(start, end), …) of them.
    - [P, hidden] with P ``positions``: one vector for each. [layers, P, hidden] likewise; without ``positions`` they
      are 0 to P - 1.

    Positions are absolute, from 0, BOS counted, prompt and generated alike. ``norm_match`` makes the change as long as
    ``scale`` times the row that it is added to.

    Raises:
        InvalidInput: shapes that do not fit each other, or what is no number or not finite.
    """
    layers = _layers(layer)
    places = None if positions is None else as_ints(positions, "positions")
    if places is not None and spans is not None:
        raise InvalidInput("steering takes positions or spans, not both; got both.")
    factor = _factor(scale)
    values = _by_layer(as_floats(direction, "direction"), layers, places)
    between = None if spans is None else _pairs(spans)
    if values.ndim == 3:
        places = _one_each(values, places)
    elif places is not None:
        between, places = _runs(places), None
    return vector_body(SteeringVector(layers, values, factor, norm_match, places, between))


def _factor(scale: Any) -> float:
    try:
        factor = float("nan" if isinstance(scale, str | bytes) else scale)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # RuntimeError: torch's, of several numbers
        raise InvalidInput(f"scale must be a finite number; got {type(scale).__name__}.") from error
    if not np.isfinite(factor):
        raise InvalidInput(f"scale must be a finite number; got {scale!r}.")
    return factor


def _pairs(spans: Any) -> tuple[tuple[int, int], ...]:
    given = [as_ints(span, "spans") for span in spans] if isinstance(spans, Iterable) else [()]
    if any(len(span) != 2 for span in given):
        raise InvalidInput("spans must be a list of pairs (start, end) of positions, such as [(0, 4), (9, 12)].")
    return tuple((start, end) for start, end in given)


def _layers(layer: int | Sequence[int]) -> tuple[int, ...]:
    given = [layer] if np.ndim(layer) == 0 else layer
    layers = as_ints(given, "layer")  # type: ignore[arg-type]  # a list by now
    if not layers or min(layers) < 0:
        raise InvalidInput(f"layer must be a block's number from 0, or a list of them; got {layer}.")
    return layers


def _by_layer(
    values: NDArray[np.float32], layers: tuple[int, ...], places: tuple[int, ...] | None
) -> NDArray[np.float32]:
    """The direction as [layers, hidden] or [layers, P, hidden]."""
    n_layers, n_places = len(layers), None if places is None else len(places)
    one_a_position = values.ndim == 2 and n_layers == 1 and n_places == len(values)
    if n_layers == 1 and (values.ndim == 1 or one_a_position):
        values = values[None]
    if values.ndim not in (2, 3) or len(values) != n_layers or not values.size:
        wanted = "[hidden]" if n_layers == 1 else f"[{n_layers}, hidden]"
        one_each = "" if n_places is None else f", or [{n_places}, hidden] for one vector a position"
        raise InvalidInput(
            f"a direction for {n_layers} layer{'s' * (n_layers > 1)} must be {wanted}{one_each}; got {_shape(values)}."
        )
    return values


def _one_each(values: NDArray[np.float32], places: tuple[int, ...] | None) -> tuple[int, ...]:
    found = tuple(range(values.shape[1])) if places is None else places
    if len(found) != values.shape[1]:
        raise InvalidInput(f"{len(found)} positions need as many vectors each layer; got {_shape(values)}.")
    return found


def _runs(places: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """One vector for all of ``places`` is sent once: as the spans that they make."""
    ordered = sorted(set(places))
    if not ordered:
        raise InvalidInput("positions must name at least one; got none. Leave it out to steer every position.")
    ends = [here for here, after in pairwise(ordered) if after != here + 1]
    starts = [after for here, after in pairwise(ordered) if after != here + 1]
    return tuple((start, end + 1) for start, end in zip([ordered[0], *starts], [*ends, ordered[-1]], strict=True))


def _shape(values: NDArray[np.float32]) -> str:
    return str(list(values.shape))
