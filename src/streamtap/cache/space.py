"""Space on the disk: what the cache occupies, whether a run fits, and giving it back."""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
from collections.abc import Sequence
from pathlib import Path

from streamtap.cache.index import Index
from streamtap.cache.parts import FOLDER, lock, part_path
from streamtap.errors import CacheBusy, InvalidInput, NotEnoughSpace

INDEX_FILE = "index.sqlite"
_BLOCK_BYTES = 512
_PART_NAME = re.compile(r"part_\d{6,}\.(bin|json)")
_UNITS = ("bytes", "KB", "MB", "GB", "TB")


def size_bytes(root: Path) -> int:
    """What the index and the part files occupy on the disk."""
    parts = root / FOLDER
    named = [file for file in parts.iterdir() if _PART_NAME.fullmatch(file.name)] if parts.is_dir() else []
    return sum(occupied_bytes(file) for file in [*named, *root.glob(INDEX_FILE + "*")])


def occupied_bytes(file: Path) -> int:
    """Bytes on the disk, holes not counted; 0 where the file is gone."""
    try:
        return file.stat().st_blocks * _BLOCK_BYTES
    except FileNotFoundError:
        return 0


def require_space(root: Path, estimated_bytes: int) -> None:
    """Refuse a run that would not fit.

    Raises:
        NotEnoughSpace: the disk has less than ``estimated_bytes`` free.
    """
    free = shutil.disk_usage(root).free
    if free < estimated_bytes:
        raise NotEnoughSpace(
            f"this run would write about {_sized(estimated_bytes)} ({estimated_bytes} bytes) to {root}, where "
            f"{_sized(free)} ({free} bytes) are free: free some space (streamtap cache clear), ask for fewer layers "
            "or a pooling, or name another cache folder."
        )


def clear(index: Index, root: Path, set_ids: Sequence[int] | None) -> int:
    """Remove sets, or everything; the bytes that came free. See ``CacheStore.clear``."""
    before = size_bytes(root)
    held: list[int] = []
    try:
        with index.writing() as db:
            chosen = _chosen(db, set_ids)
            held += _hold_parts(db, root, chosen)
            _forget(db, chosen, everything=set_ids is None)
        # The index forgot them first, so it never names a file that is gone.
        _remove_dropped(index, root)
    finally:
        for fd in held:
            os.close(fd)
    index.compact()
    return max(0, before - size_bytes(root))


def _chosen(db: sqlite3.Connection, set_ids: Sequence[int] | None) -> list[int]:
    known = [row[0] for row in db.execute("SELECT id FROM sets")]
    unknown = sorted(set(set_ids or ()) - set(known))
    if unknown:
        raise InvalidInput(f"sets {unknown} are not in this cache; it holds {known}.")
    return known if set_ids is None else list(dict.fromkeys(set_ids))


def _hold_parts(db: sqlite3.Connection, root: Path, set_ids: Sequence[int]) -> list[int]:
    held: list[int] = []
    for set_id in set_ids:
        for (part_id,) in db.execute("SELECT id FROM parts WHERE set_id = ?", (set_id,)):
            fd = _open(part_path(root, part_id))
            if fd is None:
                continue
            held.append(fd)
            if not lock(fd):
                for each in held:
                    os.close(each)
                raise CacheBusy(f"set {set_id} is being written to; clear it when that run has ended.")
    return held


def _open(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None


def _forget(db: sqlite3.Connection, set_ids: Sequence[int], *, everything: bool) -> None:
    for set_id in set_ids:
        for table in ("entries", "damaged"):
            db.execute(f"DELETE FROM {table} WHERE set_id = ?", (set_id,))
        db.execute("UPDATE parts SET state = 'dropped' WHERE set_id = ?", (set_id,))
        db.execute("DELETE FROM sets WHERE id = ?", (set_id,))
    # Nothing of a prompt stays behind once no set has rows of it.
    for table in ("prompts", "texts"):
        db.execute(f"DELETE FROM {table} WHERE digest NOT IN (SELECT digest FROM entries)")
    if everything:
        db.execute("DELETE FROM memo")


def _remove_dropped(index: Index, root: Path) -> None:
    """Remove the files of dropped parts, also those of a clear that was killed here."""
    with index.writing() as db:
        for (part_id,) in db.execute("SELECT id FROM parts WHERE state = 'dropped'").fetchall():
            for suffix in (".bin", ".json"):
                part_path(root, part_id).with_suffix(suffix).unlink(missing_ok=True)
            db.execute("DELETE FROM parts WHERE id = ?", (part_id,))


def _sized(count: float) -> str:
    for unit in _UNITS:
        if count < 1000 or unit == _UNITS[-1]:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable: the last unit takes any count")
