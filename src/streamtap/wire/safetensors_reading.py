"""Reads a safetensors file that lies in memory, as views."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from streamtap.errors import BadJson, EngineFailed
from streamtap.wire.reading import read_json

_DTYPES: dict[str, np.dtype[Any]] = {
    "I32": np.dtype("<i4"),
    "F32": np.dtype("<f4"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


def read_file(raw: bytes) -> tuple[dict[str, str], dict[str, NDArray[Any]]]:
    """Metadata and tensors of a file; the tensors are views into ``raw``.

    Raises:
        EngineFailed: it is no safetensors file of ours, or was cut short.
    """
    length = int.from_bytes(raw[:8], "little")
    try:
        header = read_json(raw[8 : 8 + length])
        metadata = header.pop("__metadata__", {})
        tensors = {name: _tensor(raw, 8 + length, entry) for name, entry in header.items()}
        return {str(name): str(text) for name, text in metadata.items()}, tensors
    except (BadJson, AttributeError, KeyError, TypeError, ValueError) as error:
        raise EngineFailed("the server's answer is not a safetensors file, or was cut short.") from error


def _tensor(raw: bytes, start: int, entry: Mapping[str, Any]) -> NDArray[Any]:
    dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
    first, last = entry["data_offsets"]
    if last - first != math.prod(shape) * dtype.itemsize:
        raise ValueError("offsets that do not fit the shape")
    return np.frombuffer(raw, dtype, math.prod(shape), start + first).reshape(shape)
