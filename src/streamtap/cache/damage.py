"""Taking what is damaged out of use, so that the next run makes it again."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path

from streamtap.cache.index import Index, select_in
from streamtap.cache.parts import Part, part_path, parts_of
from streamtap.cache.values import SetAside


def set_aside(index: Index, part: Part, digests: Sequence[bytes], why: str) -> list[bytes]:
    """Take entries of a part out of use, so that the next run writes these prompts again; those that were in use."""
    with index.writing() as db:
        sql = "SELECT digest FROM entries WHERE set_id = ? AND part_id = ? AND digest IN ({keys})"
        present = [row[0] for row in select_in(db, sql, [part.set_id, part.id], digests)]
        where = "FROM entries WHERE set_id = ? AND part_id = ? AND digest = ?"
        keys = [(part.set_id, part.id, digest) for digest in present]
        db.executemany(
            "INSERT INTO damaged (set_id, digest, part_id, first_row, n_rows, noticed, why) "
            f"SELECT set_id, digest, part_id, first_row, n_rows, ?, ? {where}",
            [(time.time(), why, *key) for key in keys],
        )
        db.executemany(f"DELETE {where}", keys)
    return present


def set_lost_aside(index: Index, root: Path, set_id: int | None = None) -> list[SetAside]:
    """Set aside what lies in part files that are gone or cut short."""
    with index.reading() as db:
        lost = _lost_entries(db, root, set_id)
    found = []
    for part, (digests, why) in lost.items():
        present = set_aside(index, part, digests, why)
        found += [SetAside(part.set_id, digest, part.id, why) for digest in present]
    return found


def _lost_entries(db: sqlite3.Connection, root: Path, set_id: int | None) -> dict[Part, tuple[list[bytes], str]]:
    """Entries whose part file is gone or ends before their rows do, with the reason."""
    lost: dict[Part, tuple[list[bytes], str]] = {}
    for part in parts_of(db, set_id):
        path = part_path(root, part.id)
        size = path.stat().st_size if path.is_file() else -1
        if size >= part.layout.size_bytes(part.rows):
            continue
        whole_rows = max(size, 0) // part.layout.chunk_bytes * part.layout.rows_per_chunk
        found = db.execute(
            "SELECT digest FROM entries WHERE set_id = ? AND part_id = ? AND n_rows > 0 AND first_row + n_rows > ?",
            (part.set_id, part.id, whole_rows),
        )
        digests = [row[0] for row in found]
        if digests:
            lost[part] = (digests, "the part file is gone" if size < 0 else "the part file is cut short")
    return lost
