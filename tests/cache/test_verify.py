"""Damage: noticed at reading and by verify, set aside, and written anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from streamtap.cache import Channel
from streamtap.cache.layout import ChunkLayout
from streamtap.errors import CacheDamaged, NotCached, RowsDamaged

NAMES = ["layer_0", "layer_1", "layer_2"]


def part(store: Any) -> Path:
    return Path(store.root / "parts" / "part_000001.bin")


def flip(file: Path, offset: int, bit: int = 0) -> None:
    data = bytearray(file.read_bytes())
    data[offset] ^= 1 << bit
    file.write_bytes(data)


def spots(layers: list[Channel]) -> list[int]:
    """Bytes that belong to row 4, which is prompt 3's: a value, its sum, its token id, its position, their sum."""
    layout = ChunkLayout.of(layers)
    at, row = layout.offsets, 4
    sums = [layout.sums_offset(name) + 8 * row for name in ("layer_1", "token_ids")]
    first = at["layer_1"] + 48 * row
    return [first, first + 47, at["token_ids"] + 4 * row, at["positions"] + 4 * row, *sums]


@pytest.mark.parametrize("spot", range(6))
@pytest.mark.parametrize("bit", [0, 7])
def test_a_flipped_bit_is_found_set_aside_and_written_anew(
    filled: Any, layers: list[Channel], spot: int, bit: int
) -> None:
    store, set_id, made = filled
    flip(part(store), spots(layers)[spot], bit)
    asked = [made.digests[3], made.digests[0], made.digests[3]]
    with pytest.raises(RowsDamaged, match="2 of 3") as caught:
        store.read(set_id, asked, "layer_1")
    assert caught.value.places == (0, 2)
    assert isinstance(caught.value, CacheDamaged)
    assert store.missing(set_id, made.digests, NAMES) == {tuple(NAMES): [3]}
    with pytest.raises(NotCached):
        store.read(set_id, asked, "layer_1")
    with store.writer(set_id, layers) as writer:
        writer.append(*made.args())
    assert store.verify().sound
    rows = store.read(set_id, made.digests, "layer_1")
    assert rows.values.tobytes() == made.rows["layer_1"].tobytes()


def test_read_all_notices_too(filled: Any, layers: list[Channel]) -> None:
    store, set_id, made = filled
    flip(part(store), spots(layers)[1], 3)
    assert len(store.read_all(set_id, "layer_0").digests) == 6
    with pytest.raises(RowsDamaged) as caught:
        store.read_all(set_id, "layer_1")
    assert len(caught.value.places) == 1
    assert made.digests[3] not in store.read_all(set_id, "layer_1").digests


def test_verify_finds_it_without_being_asked_for_the_channel(filled: Any, layers: list[Channel]) -> None:
    store, set_id, made = filled
    seen: list[tuple[int, int]] = []
    report = store.verify(lambda done, total: seen.append((done, total)))
    assert (report.sound, report.prompts, report.rows, report.read_bytes) == (True, 6, 15, 15 * 3 * 48)
    assert seen[-1] == (15 * 3 * 48, 15 * 3 * 48)
    flip(part(store), spots(layers)[0], 5)
    (damaged,) = store.verify().damaged
    assert (damaged.set_id, damaged.digest) == (set_id, made.digests[3])
    assert store.verify().sound
    assert store.missing(set_id, made.digests, ["layer_2"]) == {("layer_2",): [3]}


def test_rows_that_came_back_as_zeros_are_found(filled: Any, layers: list[Channel]) -> None:
    store, set_id, made = filled
    file = part(store)
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(RowsDamaged) as caught:
        store.read(set_id, made.digests, "layer_0")
    assert caught.value.places == (0, 1, 3, 4, 5)


@pytest.mark.parametrize("ask", ["missing", "read", "verify", "view"])
@pytest.mark.parametrize("harm", ["cut", "empty", "gone", "folder"])
def test_a_part_that_is_cut_or_gone_is_missing_and_written_anew(
    filled: Any, layers: list[Channel], ask: str, harm: str
) -> None:
    store, set_id, made = filled
    file = part(store)
    if harm == "folder":
        for each in file.parent.iterdir():
            each.unlink()
        file.parent.rmdir()
    elif harm == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[: -3 if harm == "cut" else 0])
    if ask == "read":
        with pytest.raises(RowsDamaged, match="5 of 6"):
            store.read(set_id, made.digests, "layer_0")
    elif ask == "view":
        assert store.view(set_id, "layer_0") == []
    elif ask == "verify":
        assert len(store.verify().damaged) == 5
    lost = [0, 1, 3, 4, 5]
    assert store.missing(set_id, made.digests, NAMES) == {tuple(NAMES): lost}
    with store.writer(set_id, layers) as writer:
        writer.append(*made.args())
    assert store.missing(set_id, made.digests, NAMES) == {}
    assert store.read(set_id, made.digests, "layer_2").values.tobytes() == made.rows["layer_2"].tobytes()
