"""Giving space back, and asking for it."""

from __future__ import annotations

import sqlite3
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from streamtap.cache import CacheStore, Channel
from streamtap.errors import CacheBusy, InvalidInput, NotCached, NotEnoughSpace


def test_clear_removes_our_files_and_no_other(filled: Any) -> None:
    store, set_id, made = filled
    context = b"c" * 16
    store.remember_texts(context, made.digests, made.keys, [0] * 6)
    store.remember("note", {"a": 1})
    foreign = [store.root / "notes.txt", store.root / "parts" / "mine.bin", store.root / "parts" / "part_000099.bin"]
    foreign += [store.root / "parts" / "folder" / "part_000001.bin", store.root / "sub" / "index.sqlite"]
    for file in foreign:
        file.parent.mkdir(exist_ok=True)
        file.write_text("keep me")
    before = store.size_bytes()
    freed = store.clear()
    assert freed == before - store.size_bytes() > 0
    assert all(file.read_text() == "keep me" for file in foreign)
    assert not (store.root / "parts" / "part_000001.bin").exists()
    assert not (store.root / "parts" / "part_000001.json").exists()
    assert store.sets() == []
    assert store.recall("note") is None
    assert store.recall_texts(context, made.digests) == [None] * 6
    with pytest.raises(NotCached):
        store.token_ids(made.digests)
    assert set_id not in {each.id for each in store.sets()}


def test_clear_of_one_set_keeps_the_other(filled: Any, layers: list[Channel], sample: Any) -> None:
    store, set_id, made = filled
    other = store.ensure_set({"model": "b"}, {})
    kept = sample(layers, [2, 2], first=4)
    with store.writer(other, layers) as writer:
        writer.append(*kept.args())
    store.clear([set_id])
    assert [each.id for each in store.sets()] == [other]
    assert store.read(other, kept.digests, "layer_0").values.tobytes() == kept.rows["layer_0"].tobytes()
    assert len(store.token_ids(kept.digests)) == 2
    with pytest.raises(NotCached, match="4 of 6"):
        store.token_ids(made.digests)
    again = store.ensure_set({"model": "a"}, {})
    assert again not in (set_id, other)
    with store.writer(again, layers) as writer:
        writer.append(*made.args())
    assert store.read(again, made.digests, "layer_2").values.tobytes() == made.rows["layer_2"].tobytes()


def test_a_set_being_written_is_not_cleared(filled: Any, layers: list[Channel]) -> None:
    store, set_id, made = filled
    with store.writer(set_id, layers), pytest.raises(CacheBusy, match="being written"):
        store.clear()
    assert len(store.read(set_id, made.digests, "layer_0").offsets) == 7
    store.clear([set_id])
    with pytest.raises(InvalidInput, match=r"sets \[99\]"):
        store.clear([99])


def test_a_clear_that_was_killed_half_way_is_finished_by_the_next(filled: Any) -> None:
    store, _, _ = filled
    file = store.root / "parts" / "part_000001.bin"
    with sqlite3.connect(store.root / "index.sqlite") as db:
        db.execute("UPDATE parts SET state = 'dropped'")
        db.execute("DELETE FROM entries")
    db.close()
    assert file.exists()
    store.clear([])
    assert not file.exists()


def test_a_foreign_file_under_the_next_name_is_not_touched(
    store: CacheStore, layers: list[Channel], sample: Any
) -> None:
    foreign = store.root / "parts" / "part_000001.bin"
    foreign.write_bytes(b"not ours")
    set_id = store.ensure_set({}, {})
    made = sample(layers, [1])
    with store.writer(set_id, layers) as writer:
        writer.append(*made.args())
    assert foreign.read_bytes() == b"not ours"
    assert store.read(set_id, made.digests, "layer_0").values.tobytes() == made.rows["layer_0"].tobytes()
    store.clear()
    assert foreign.read_bytes() == b"not ours"


def test_space_is_asked_for_with_both_figures(store: CacheStore, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(10**9, 0, 5_000_000))
    store.require_space(5_000_000)
    with pytest.raises(NotEnoughSpace, match=r"7\.0 MB .*5\.0 MB") as caught:
        store.require_space(7_000_000)
    assert isinstance(caught.value, OSError)


def test_the_size_counts_our_files_only(filled: Any) -> None:
    store: CacheStore = filled[0]
    size = store.size_bytes()
    Path(store.root / "parts" / "big.dat").write_bytes(bytes(10**6))
    assert store.size_bytes() == size
    assert size >= store.sets()[0].bytes
