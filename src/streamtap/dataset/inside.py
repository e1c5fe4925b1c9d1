"""Paths that a dataset names, held inside it: an index is written by strangers."""

from __future__ import annotations

from streamtap.errors import DatasetDamaged


def inside(path: str, name: str) -> str:
    """``path`` itself, if it stays within the dataset called ``name``.

    Raises:
        DatasetDamaged: it is absolute, or climbs out.
    """
    parts = path.split("/")
    if {"", ".", ".."} & set(parts) or not path.isprintable() or "\\" in path:
        raise DatasetDamaged(f"{name} names {path!r} as one of its files, which is not a path inside a dataset.")
    return path
