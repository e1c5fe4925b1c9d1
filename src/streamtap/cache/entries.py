"""Entries: which part holds which prompt's rows."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from streamtap.cache.index import Connection, select_in
from streamtap.cache.parts import Part, parts_of

Missing = dict[tuple[str, ...], list[int]]
# Reading a whole set is quicker than looking its prompts up one by one from this share on.
_SHARE = 4


@dataclass(frozen=True)
class Placement:
    """Prompts of one part in the order of their rows; ``first_rows`` and ``n_rows`` are int64 [prompts]."""

    part: Part
    digests: tuple[bytes, ...]
    first_rows: NDArray[np.int64]
    n_rows: NDArray[np.int64]

    @cached_property
    def numbers(self) -> dict[bytes, int]:
        """Each digest's number in this placement."""
        return {digest: number for number, digest in enumerate(self.digests)}


def add_entries(
    db: sqlite3.Connection,
    set_id: int,
    part_id: int,
    rows: Iterable[tuple[bytes, int, int]],
    next_row: int,
) -> None:
    """Commit prompts ``(digest, first_row, n_rows)`` of a part, whose free rows now start at ``next_row``."""
    db.executemany(
        "INSERT INTO entries VALUES (?, ?, ?, ?, ?)",
        ((set_id, digest, part_id, first_row, n_rows) for digest, first_row, n_rows in rows),
    )
    db.execute("UPDATE parts SET rows = ? WHERE id = ?", (next_row, part_id))


def missing(db: Connection, set_id: int, digests: Sequence[bytes], channels: Sequence[str]) -> Missing:
    """Places in ``digests`` grouped by the channels that they lack, in the order of ``channels``."""
    bits = {name: 1 << number for number, name in enumerate(channels)}
    have = [0] * len(digests)
    for each in _placements(db, set_id, digests):
        held = sum(bits.get(name, 0) for name in each.part.layout.names())
        numbers = each.numbers
        for place, digest in enumerate(digests):
            if digest in numbers:
                have[place] |= held
    whole = (1 << len(channels)) - 1
    groups: dict[int, list[int]] = defaultdict(list)
    for place, held in enumerate(have):
        if held != whole:
            groups[whole & ~held].append(place)
    return {tuple(name for name in channels if bits[name] & lacking): places for lacking, places in groups.items()}


def find_entries(
    db: Connection, set_id: int, digests: Sequence[bytes], channel: str
) -> tuple[list[Part], NDArray[np.int64]]:
    """Parts with the channel, and int64 [prompts, 3]: each prompt's part number, first row and row count, or -1."""
    table = np.full((len(digests), 3), -1, np.int64)
    for each in _placements(db, set_id, digests):
        if channel in each.part.layout.names():
            numbers = np.array([each.numbers.get(digest, -1) for digest in digests], np.int64)
            places = np.flatnonzero((numbers >= 0) & (table[:, 0] < 0))
            numbers = numbers[places]
            table[places, 0] = each.part.id
            table[places, 1], table[places, 2] = each.first_rows[numbers], each.n_rows[numbers]
    return [part for part in parts_of(db, set_id) if channel in part.layout.names()], table


def placement(db: Connection, part: Part) -> Placement:
    """Every prompt of a part, in the order of its rows."""
    return db.kept(("placement", part.id), lambda: _read_placement(db, part))


def _read_placement(db: Connection, part: Part) -> Placement:
    # One text each instead of a Python tuple a prompt: a whole layer must not wait for its index.
    digests, first_rows, n_rows = db.execute(
        "SELECT group_concat(hex(digest), ''), group_concat(first_row), group_concat(n_rows) FROM entries "
        "WHERE set_id = ? AND part_id = ?",
        (part.set_id, part.id),
    ).fetchone()
    first = _numbers(first_rows)
    order = np.argsort(first, kind="stable")
    packed = np.frombuffer(bytes.fromhex(digests or ""), "V16")[order]
    return Placement(part, tuple(packed.tolist()), first[order], _numbers(n_rows)[order])


def _placements(db: Connection, set_id: int, digests: Sequence[bytes]) -> list[Placement]:
    """Each part of a set with its prompts, at least those asked for."""
    parts = parts_of(db, set_id)
    most = _SHARE * len(digests)
    sql = "SELECT count(*) FROM (SELECT 1 FROM entries WHERE set_id = ? LIMIT ?)"
    if db.execute(sql, (set_id, most + 1)).fetchone()[0] <= most:
        return [placement(db, part) for part in parts]
    found: dict[int, list[tuple[bytes, int, int]]] = defaultdict(list)
    sql = "SELECT part_id, digest, first_row, n_rows FROM entries WHERE set_id = ? AND digest IN ({keys})"
    for part_id, *entry in select_in(db, sql, [set_id], digests):
        found[part_id].append((entry[0], entry[1], entry[2]))
    return [_some(part, found[part.id]) for part in parts if part.id in found]


def _some(part: Part, entries: Sequence[tuple[bytes, int, int]]) -> Placement:
    digests, first_rows, n_rows = zip(*entries, strict=True)
    return Placement(part, digests, np.array(first_rows, np.int64), np.array(n_rows, np.int64))


def _numbers(text: str | None) -> NDArray[np.int64]:
    return np.fromstring(text, np.int64, sep=",") if text else np.zeros(0, np.int64)
