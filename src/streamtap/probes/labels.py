"""Labels to one numpy array of one type, refused where they could be misread."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamtap.errors import InvalidRows

Labels = NDArray[Any]

_KINDS = "whole numbers, bools or strings"


def read_labels(labels: Any, n_rows: int, *, min_classes: int = 2) -> Labels:
    """Read ``labels`` as an array [rows] of int, bool, str or whole-numbered float, in the type they came in.

    ``min_classes`` is 2 for training and 1 for scoring.

    Raises:
        InvalidRows: missing values, fractions, mixed types, another length than ``n_rows``, or too few classes.
    """
    array = _to_array(labels)
    if array.ndim != 1:
        raise InvalidRows(f"labels: expected one label a row, a 1-D sequence; got shape {array.shape}.")
    if len(array) != n_rows:
        raise InvalidRows(f"labels: expected one label for each of the {n_rows} rows; got {len(array)} labels.")
    _check_values(array)
    classes, counts = np.unique(array, return_counts=True)
    if len(classes) < min_classes:
        raise InvalidRows(
            f"a probe needs at least {min_classes} classes to learn from; all {counts[0]} labels are {classes[0]!s}."
        )
    return array


def _to_array(labels: Any) -> NDArray[Any]:
    if hasattr(labels, "detach") and hasattr(labels, "cpu"):
        labels = labels.detach().cpu().numpy()
    if isinstance(labels, np.ndarray) and labels.dtype != object:
        return labels
    if isinstance(labels, str | bytes) or not hasattr(labels, "__iter__"):
        raise InvalidRows(f"labels: expected a sequence of {_KINDS}; got {type(labels).__name__}.")
    return _from_objects(list(labels))


def _from_objects(items: list[Any]) -> NDArray[Any]:
    # numpy would turn [True, "no"] into two strings, so the types are looked at one by one.
    if items and all(np.ndim(item) == 1 for item in items):
        return np.asarray(items)
    kinds = [_kind(item) for item in items]
    if None in kinds:
        first = kinds.index(None)
        raise InvalidRows(
            f"label {first} is {items[first]!r:.40}, which is no label; labels are {_KINDS}. "
            "Leave rows without a label out."
        )
    found = set(kinds)
    if len(found) > 1 and found != {"int", "float"}:
        raise InvalidRows(f"labels must be of one type; these mix {', '.join(sorted(map(str, found)))}.")
    return np.asarray(items)


def _kind(item: Any) -> str | None:
    if isinstance(item, bool | np.bool_):
        return "bool"
    if isinstance(item, int | np.integer):
        return "int"
    if isinstance(item, float | np.floating):
        return "float"
    return "str" if isinstance(item, str) else None


def _check_values(array: NDArray[Any]) -> None:
    if array.dtype.kind not in "iubUf":
        raise InvalidRows(f"labels must be {_KINDS}; got an array of dtype {array.dtype}.")
    if array.dtype.kind != "f":
        return
    missing = ~np.isfinite(array)
    if missing.any():
        raise InvalidRows(
            f"label {int(np.argmax(missing))} is {array[np.argmax(missing)]}; leave rows without a label out."
        )
    fractions = array != np.round(array)
    if fractions.any():
        first = int(np.argmax(fractions))
        raise InvalidRows(
            f"label {first} is {array[first]}, a fraction; a classifier takes {_KINDS}. "
            "Cut a continuous score at a threshold first: scores > 0.5."
        )
