"""Rows from wherever they come (numpy, torch, ``Activations``) to one finite float matrix."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamtap.activations import Activations
from streamtap.errors import InvalidRows

Rows = NDArray[np.float32] | NDArray[np.float64]

_WANTED = "expected a 2-D array of numbers [rows, hidden]"


def read_rows(source: Any, *, layer: int | None = None, hidden: int | None = None) -> Rows:
    """Read ``source`` as [rows, hidden]; float64 stays float64, every other dtype becomes float32.

    ``source`` is an array or a nested list, a torch tensor of any float dtype on any device, or an
    ``Activations`` with one row a prompt. ``layer`` chooses among the layers of an ``Activations``
    and may be left out where it holds one; ``hidden`` is the width that must come.

    Raises:
        InvalidRows: not 2-D, empty, not numbers, not finite, or not ``hidden`` wide.
    """
    array = _to_numpy(_rows_of(source, layer) if isinstance(source, Activations) else source)
    _check_shape(array, hidden)
    rows = _to_float(array)
    finite = np.isfinite(rows).all(axis=1)
    if not finite.all():
        first = int(np.argmin(finite))
        raise InvalidRows(
            f"row {first} holds NaN or infinity ({int((~finite).sum())} of {len(rows)} rows do); "
            "capture these rows again, or leave them out together with their labels."
        )
    return rows


def layer_of(source: Any, layer: int | None = None) -> int | None:
    """The layer that ``read_rows`` would take from ``source``; None where it is a plain array.

    Raises:
        InvalidRows: an ``Activations`` that does not hold ``layer``, or several with none named.
    """
    if not isinstance(source, Activations):
        return None
    held = list(source.layers)
    if layer is None and len(held) == 1:
        return held[0]
    if layer is None:
        raise InvalidRows(f"a probe reads one layer, and these Activations hold {held}; name one with layer=.")
    if layer not in source.acts:
        raise InvalidRows(f"these Activations hold layers {held}, not layer {layer}.")
    return layer


def _rows_of(source: Activations, layer: int | None) -> NDArray[Any]:
    chosen = layer_of(source, layer)
    counts = np.diff(source.offsets)
    if np.any(counts != 1):
        first = int(np.argmax(counts != 1))
        raise InvalidRows(
            f"a probe needs one row a prompt, and prompt {first} has {int(counts[first])}; "
            "capture with a pooling such as 'last_token', or pool the rows first."
        )
    return source.acts[chosen]  # type: ignore[index]  # layer_of gives None only for plain arrays


def _to_numpy(source: Any) -> NDArray[Any]:
    # A torch tensor is known by its methods, so that torch need not be installed.
    if hasattr(source, "detach") and hasattr(source, "cpu"):
        tensor = source.detach()
        return np.asarray((tensor if str(tensor.dtype) == "torch.float64" else tensor.float()).cpu().numpy())
    try:
        return np.asarray(source)
    except ValueError as error:
        raise InvalidRows(f"rows: {_WANTED}; got a nested list of uneven lengths.") from error


def _check_shape(array: NDArray[Any], hidden: int | None) -> None:
    if not _is_numeric(array.dtype):
        raise InvalidRows(f"rows: {_WANTED}; got an array of dtype {array.dtype}.")
    if array.ndim != 2:
        hint = "; for a single row pass row[None, :]" if array.ndim == 1 else ""
        raise InvalidRows(f"rows: {_WANTED}; got shape {array.shape}{hint}.")
    if 0 in array.shape:
        raise InvalidRows(f"rows: {_WANTED} with at least one row and one column; got shape {array.shape}.")
    if hidden is not None and array.shape[1] != hidden:
        raise InvalidRows(
            f"rows: this probe was fitted on rows {hidden} wide; got {array.shape[1]}. "
            "Rows of another model or layer width cannot be read by it."
        )


def _is_numeric(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "fiub" or dtype.name == "bfloat16" or dtype.name.startswith("float8_")


def _to_float(array: NDArray[Any]) -> Rows:
    # Integers of 32 bits and more do not fit float32's 24 bits of mantissa.
    wide = (array.dtype.kind == "f" and array.dtype.itemsize >= 8) or (
        array.dtype.kind in "iu" and array.dtype.itemsize >= 4
    )
    if wide:
        return np.asarray(array, dtype=np.float64)
    return np.asarray(array, dtype=np.float32)
