"""Which part files there are, and how a writer gets one for itself."""

from __future__ import annotations

import fcntl
import os
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from streamtap.cache.index import Index
from streamtap.cache.layout import Channel, ChunkLayout
from streamtap.cache.partfile import PartFile
from streamtap.errors import InvalidInput

FOLDER = "parts"


@dataclass(frozen=True)
class Part:
    """A part as the index knows it; rows from ``rows`` on are free."""

    id: int
    set_id: int
    layout: ChunkLayout
    rows: int
    state: str


@dataclass
class HeldPart:
    """A part that this writer holds for itself; ``next_row`` is where the next batch goes."""

    id: int
    file: PartFile
    next_row: int

    @property
    def bytes(self) -> int:
        """Length of the file for the rows so far."""
        return self.file.layout.size_bytes(self.next_row)

    def release(self) -> None:
        """Let others write to it."""
        os.close(self.file.fd)


def part_path(root: Path, part_id: int) -> Path:
    """Where a part's rows lie; its layout stands beside it as JSON."""
    return root / FOLDER / f"part_{part_id:06d}.bin"


def parts_of(db: sqlite3.Connection, set_id: int | None = None) -> list[Part]:
    """Parts of one set, or of all, oldest first."""
    rows = db.execute(
        "SELECT id, set_id, layout, rows, state FROM parts WHERE (? IS NULL OR set_id = ?) AND state != 'dropped' "
        "ORDER BY id",
        (set_id, set_id),
    )
    return [Part(row[0], row[1], _layout(row[2]), row[3], row[4]) for row in rows]


@lru_cache(maxsize=256)
def _layout(text: str) -> ChunkLayout:
    return ChunkLayout.from_json(text)


def check_channels(parts: Sequence[Part], channels: Sequence[Channel]) -> None:
    """Refuse a channel that the set holds in another dtype or width.

    Raises:
        InvalidInput: it does.
    """
    known = {channel.name: channel for part in parts for channel in part.layout.channels}
    for channel in channels:
        held = known.get(channel.name, channel)
        if held != channel:
            raise InvalidInput(
                f"channel {channel.name!r} of this set is {held.dtype} of width {held.width}; got "
                f"{channel.dtype} of width {channel.width}. Rows of another kind need another identity."
            )


def take_part(index: Index, root: Path, set_id: int, channels: Sequence[Channel]) -> HeldPart:
    """A part of exactly these channels that nobody else writes to: one that is there, or a new one.

    Raises:
        InvalidInput: the set is not there, or holds a channel in another dtype or width.
    """
    with index.reading() as db:
        if not db.execute("SELECT 1 FROM sets WHERE id = ?", (set_id,)).fetchone():
            raise InvalidInput(f"set {set_id} is not in this cache; ensure_set makes one.")
        parts = parts_of(db, set_id)
    check_channels(parts, channels)
    for part in parts:
        if part.state == "open" and set(part.layout.channels) == set(channels):
            held = _hold(index, root, part)
            if held:
                return held
    return _create(index, root, set_id, ChunkLayout.of(channels))


def lock(fd: int) -> bool:
    """Try to hold a part file; the lock ends with the descriptor, also when the process is killed."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _hold(index: Index, root: Path, part: Part) -> HeldPart | None:
    try:
        fd = os.open(part_path(root, part.id), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    held = HeldPart(part.id, PartFile(fd, part.layout), 0)
    row = _free_row(index, part.id) if lock(fd) else None
    if row is None:
        held.release()
        return None
    held.next_row = row
    return held


def _free_row(index: Index, part_id: int) -> int | None:
    """Where the next row goes, read anew now that the lock is ours: the last holder may have moved it."""
    with index.reading() as db:
        row = db.execute("SELECT rows FROM parts WHERE id = ? AND state = 'open'", (part_id,)).fetchone()
    return None if row is None else int(row[0])


def _create(index: Index, root: Path, set_id: int, layout: ChunkLayout) -> HeldPart:
    # The file is there and locked before others can see its row in the index.
    (root / FOLDER).mkdir(exist_ok=True)
    fd = -1
    try:
        with index.writing() as db:
            part_id, fd = _new_file(db, root, set_id, layout)
            _write_layout(part_path(root, part_id).with_suffix(".json"), layout)
            sync_folder(root / FOLDER)
    except BaseException:
        if fd >= 0:
            os.close(fd)
        raise
    return HeldPart(part_id, PartFile(fd, layout), 0)


def _new_file(db: sqlite3.Connection, root: Path, set_id: int, layout: ChunkLayout) -> tuple[int, int]:
    """Part number and descriptor; a number whose file is there and not empty belongs to someone else."""
    while True:
        row = db.execute("INSERT INTO parts (set_id, layout) VALUES (?, ?)", (set_id, layout.to_json()))
        part_id = int(row.lastrowid or 0)
        fd = os.open(part_path(root, part_id), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        # An empty one is what a writer left that was killed right here.
        if os.fstat(fd).st_size == 0 and lock(fd):
            return part_id, fd
        os.close(fd)
        db.execute("DELETE FROM parts WHERE id = ?", (part_id,))


def _write_layout(path: Path, layout: ChunkLayout) -> None:
    draft = path.with_suffix(".json.new")
    with draft.open("w", encoding="utf-8") as stream:
        stream.write(layout.to_json())
        stream.flush()
        os.fsync(stream.fileno())
    draft.replace(path)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
