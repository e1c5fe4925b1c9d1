"""Safetensors files of any shapes: the header made before the values, so that they may be written in any order.

The layout is the safetensors specification's: an 8-byte little-endian header length, a JSON header, and dense
little-endian tensors. Ours because values must be written as they are made, and found without reading a file whole.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from streamtap.errors import InvalidInput

Array = NDArray[Any]

LENGTH_BYTES = 8
#: The specification's own bound.
MOST_HEADER_BYTES = 100_000_000
_NAMES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
}


@dataclass(frozen=True)
class TensorPlace:
    """A tensor of a file: its values are bytes [start, stop) of the file."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        """Where its bytes end."""
        return self.start + math.prod(self.shape) * self.dtype.itemsize


def make_header(
    tensors: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, TensorPlace]]:
    """The first bytes of a file of ``tensors`` (name to dtype and shape), and where each lies in it.

    Raises:
        InvalidInput: a dtype that the format has no name for.
    """
    names = {dtype: name for name, dtype in _NAMES.items()}
    entries: dict[str, Any] = {} if not metadata else {"__metadata__": dict(metadata)}
    places: dict[str, TensorPlace] = {}
    start = 0
    for key, (dtype, shape) in tensors.items():
        if dtype not in names:
            raise InvalidInput(f"tensor {key} is {dtype}; a file holds {', '.join(map(str, names))}.")
        places[key] = TensorPlace(dtype, tuple(shape), start)
        entries[key] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [start, places[key].stop]}
        start = places[key].stop
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)  # so that the tensors are aligned
    header = len(text).to_bytes(LENGTH_BYTES, "little") + text
    return header, {key: replace(place, start=len(header) + place.start) for key, place in places.items()}


def header_bytes(length: bytes, name: str) -> int:
    """Length of the JSON header, from a file's first 8 bytes.

    Raises:
        InvalidInput: no safetensors file.
    """
    size = int.from_bytes(length, "little")
    if len(length) != LENGTH_BYTES or not 2 <= size <= MOST_HEADER_BYTES:
        raise InvalidInput(f"{name} is not a safetensors file.")
    return size


def parse_header(text: bytes, name: str) -> tuple[dict[str, TensorPlace], dict[str, str]]:
    """The tensors and the metadata that a JSON header names; ``name`` is the file's, for errors.

    Raises:
        InvalidInput: a header that means nothing, or names a dtype that is none of ours.
    """
    base = LENGTH_BYTES + len(text)
    try:
        entries = json.loads(text)
        metadata = {str(key): str(value) for key, value in entries.pop("__metadata__", {}).items()}
        return {key: _place(each, base) for key, each in entries.items()}, metadata
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise InvalidInput(f"the header of {name} is damaged ({type(error).__name__}).") from error


def tensor_bytes(tensors: Mapping[str, Array], metadata: Mapping[str, str] | None = None) -> bytes:
    """A whole file, for small ones.

    Raises:
        InvalidInput: as ``make_header``.
    """
    header, _ = make_header({name: (each.dtype, each.shape) for name, each in tensors.items()}, metadata)
    return b"".join([header, *(np.ascontiguousarray(each).tobytes() for each in tensors.values())])


def read_tensors(raw: bytes, name: str) -> tuple[dict[str, Array], dict[str, str]]:
    """Tensors, as read-only views into ``raw``, and metadata of a file that lies in memory.

    Raises:
        InvalidInput: it is no safetensors file, or is cut short.
    """
    length = header_bytes(raw[:LENGTH_BYTES], name)
    places, metadata = parse_header(raw[LENGTH_BYTES : LENGTH_BYTES + length], name)
    if any(place.stop > len(raw) for place in places.values()):
        raise InvalidInput(f"{name} is cut short: it has {len(raw)} bytes, and its header names more.")
    return {key: view_of(raw, place) for key, place in places.items()}, metadata


def view_of(raw: bytes | memoryview, place: TensorPlace, base: int = 0) -> Array:
    """A tensor whose file's bytes from ``base`` on are ``raw``."""
    count = math.prod(place.shape)
    return np.frombuffer(raw, place.dtype, count, place.start - base).reshape(place.shape)


def _place(entry: Mapping[str, Any], base: int) -> TensorPlace:
    start, stop = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if any(type(number) is not int or number < 0 for number in (*shape, start, stop)):
        raise ValueError("no tensor")
    place = TensorPlace(_NAMES[entry["dtype"]], shape, base + start)
    if place.stop != base + stop:
        raise ValueError("offsets that do not fit the shape")
    return place
