"""Layer specs to block numbers.

Layer k is the output of decoder block k, from 0, before the final norm. Other tools
count differently; ``from_hidden_states_index`` and ``to_hidden_states_index`` convert.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from streamtap.errors import InvalidLayers

LayerSpec = int | str | Sequence[int]

_RANGE = re.compile(r"(\d+)-(\d+)", re.ASCII)
_SLICE = re.compile(r"(-?\d+)?:(-?\d+)?", re.ASCII)
_SPACED_MARKS = re.compile(r"\s*([,:-])\s*")


def resolve_layers(spec: LayerSpec, n_layers: int) -> tuple[int, ...]:
    """Block numbers that ``spec`` names in a model of ``n_layers`` blocks, ascending, each once.

    ``16``, ``-1``, ``[8, 16]``, ``"all"``, ``"middle"`` (block ``n_layers // 2``), ``"last"``,
    ``"8-20"`` (both ends included), ``"8,16,20-24"``, ``"8:20"`` (end left out).

    Raises:
        InvalidLayers: the spec means nothing, or names a block that the model lacks.
    """
    if isinstance(spec, str):
        return _from_text(spec, n_layers)
    if isinstance(spec, int | np.integer) and not isinstance(spec, bool):
        return (_one(int(spec), n_layers),)
    try:
        items: list[Any] = list(spec)  # type: ignore[arg-type]  # a bool is refused here too
    except TypeError as error:
        raise InvalidLayers(f"layers must be an int, a list of ints or text such as 'all'; got {spec!r}.") from error
    if not all(_is_int(item) for item in items):
        raise InvalidLayers(f"layers must be whole numbers; got {items!r}.")
    return tuple(sorted({_one(int(item), n_layers) for item in items}))


def from_hidden_states_index(index: int) -> int:
    """Our layer for entry ``index`` of ``hidden_states``, whose entry 0 is the embedding.

    The last entry is normed there and raw here, so the two differ in value at the last block.

    Raises:
        InvalidLayers: entry 0, which no block has written, or a negative one.
    """
    if index < 1:
        raise InvalidLayers(f"hidden_states[{index}] is not a block's output; entries 1 to N are blocks 0 to N - 1.")
    return index - 1


def to_hidden_states_index(layer: int) -> int:
    """Entry of ``hidden_states`` that stands behind block ``layer``.

    Raises:
        InvalidLayers: ``layer`` is negative.
    """
    if layer < 0:
        raise InvalidLayers(f"layer must be 0 or more to be converted; got {layer}.")
    return layer + 1


def _from_text(spec: str, n_layers: int) -> tuple[int, ...]:
    named = {"all": range(n_layers), "middle": [n_layers // 2], "last": [n_layers - 1]}
    if spec in named:
        return tuple(named[spec])
    found: set[int] = set()
    for piece in _SPACED_MARKS.sub(r"\1", spec.strip()).split(","):
        found.update(_piece(piece, spec, n_layers))
    return tuple(sorted(found))


def _piece(piece: str, spec: str, n_layers: int) -> Iterable[int]:
    if re.fullmatch(r"-?\d+", piece, re.ASCII):
        return [_one(int(piece), n_layers)]
    if match := _RANGE.fullmatch(piece):
        first, last = (_one(int(end), n_layers) for end in match.groups())
        if first > last:
            raise InvalidLayers(f"layers {spec!r}: the range {piece} runs backwards; write {last}-{first}.")
        return range(first, last + 1)
    if match := _SLICE.fullmatch(piece):
        start, stop = (int(end) if end else None for end in match.groups())
        if numbers := range(n_layers)[start:stop]:
            return numbers
        raise InvalidLayers(f"layers {spec!r}: {piece} names no block of the model's {n_layers}.")
    raise InvalidLayers(
        f"layers {spec!r} is not understood; write a number, a list, 'all', 'middle', 'last', '8-20' or '8,16'."
    )


def _one(layer: int, n_layers: int) -> int:
    if not -n_layers <= layer < n_layers:
        raise InvalidLayers(
            f"layer {layer} is not in the model: it has {n_layers} blocks, 0 to {n_layers - 1} (-1 is the last)."
        )
    return layer % n_layers


def _is_int(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)
