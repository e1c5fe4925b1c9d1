"""What each set holds."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

from streamtap.cache.layout import Channel
from streamtap.cache.parts import Part, part_path, parts_of
from streamtap.cache.space import occupied_bytes
from streamtap.cache.values import SetInfo


def list_sets(db: sqlite3.Connection, root: Path) -> list[SetInfo]:
    """Every set, oldest first; a prompt that lies in several parts counts once, with the most rows it has."""
    found = db.execute("SELECT id, identity, provenance, created FROM sets ORDER BY id").fetchall()
    return [_set_info(db, root, row, parts_of(db, row[0])) for row in found]


def _set_info(db: sqlite3.Connection, root: Path, row: tuple[int, str, str, float], parts: list[Part]) -> SetInfo:
    prompts, rows = db.execute(
        "SELECT count(*), coalesce(sum(most), 0) FROM "
        "(SELECT max(n_rows) AS most FROM entries WHERE set_id = ? GROUP BY digest)",
        (row[0],),
    ).fetchone()
    channels: dict[str, Channel] = {}
    for part in parts:
        channels |= {channel.name: channel for channel in part.layout.channels}
    size = sum(occupied_bytes(part_path(root, part.id)) for part in parts)
    identity, provenance = json.loads(row[1]), json.loads(row[2])
    return SetInfo(row[0], identity, provenance, row[3], prompts, rows, tuple(channels.values()), size)
