"""Reading everything once to find what does not match its checksums."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamtap.cache.damage import set_aside, set_lost_aside
from streamtap.cache.entries import Placement, placement
from streamtap.cache.gather import by_chunk
from streamtap.cache.index import Index
from streamtap.cache.layout import POSITIONS, SUMS, TOKEN_IDS, ChunkLayout
from streamtap.cache.partfile import PartFile
from streamtap.cache.parts import Part, part_path, parts_of
from streamtap.cache.sums import row_sums, token_sums
from streamtap.cache.values import SetAside, VerifyReport
from streamtap.ragged import ranges

Progress = Callable[[int, int], None]


def verify(index: Index, root: Path, progress: Progress | None = None) -> VerifyReport:
    """Check every row of every channel; ``progress(done_bytes, total_bytes)`` is called after each chunk."""
    damaged = set_lost_aside(index, root)
    with index.reading() as db:
        placements = [placement(db, part) for part in parts_of(db)]
    total = sum(int(each.n_rows.sum()) * _row_bytes(each.part) for each in placements)
    done = 0
    for each in placements:
        bad = np.zeros(int(each.n_rows.sum()), np.bool_)
        for start, stop, wrong in _checked(root, each):
            bad[start:stop] = wrong
            done += (stop - start) * _row_bytes(each.part)
            if progress:
                progress(done, total)
        damaged += _put_aside(index, each, bad)
    rows = sum(int(each.n_rows.sum()) for each in placements)
    prompts = {(each.part.set_id, digest) for each in placements for digest in each.digests}
    return VerifyReport(len(prompts), rows, done, tuple(damaged))


def _checked(root: Path, placed: Placement) -> Iterator[tuple[int, int, NDArray[np.bool_]]]:
    """Start, stop and bad rows of each stretch of a part's rows."""
    rows, layout = ranges(placed.first_rows, placed.n_rows), placed.part.layout
    if not len(rows):
        return
    with suppress(FileNotFoundError), PartFile.reading(part_path(root, placed.part.id), layout) as file:
        # A file that is gone by now was cleared since the index was read.
        for chunk, start, stop in by_chunk(rows, layout.rows_per_chunk):
            yield start, stop, _bad_rows(file.read_chunk(chunk), layout, rows[start:stop])


def _bad_rows(record: NDArray[Any], layout: ChunkLayout, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
    places = rows % layout.rows_per_chunk
    sums = record[SUMS][0][:, places]
    tokens = token_sums(record[TOKEN_IDS][0][places], record[POSITIONS][0][places], rows)
    bad: NDArray[np.bool_] = np.not_equal(sums[layout.sums_row(TOKEN_IDS)], tokens)
    for channel in layout.channels:
        bad |= sums[layout.sums_row(channel.name)] != row_sums(record[channel.name][0][places], rows)
    return bad


def _put_aside(index: Index, placed: Placement, bad: NDArray[np.bool_]) -> list[SetAside]:
    if not bad.any():
        return []
    why = "a row does not match its checksum"
    owners = np.repeat(np.arange(len(placed.digests)), placed.n_rows)
    digests = [placed.digests[place] for place in np.unique(owners[bad])]
    present = set_aside(index, placed.part, digests, why)
    return [SetAside(placed.part.set_id, digest, placed.part.id, why) for digest in present]


def _row_bytes(part: Part) -> int:
    return sum(channel.row_bytes for channel in part.layout.channels)
