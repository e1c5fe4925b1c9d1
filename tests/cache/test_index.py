"""Transactions of the index: whole or not at all, and what is kept of them."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from streamtap.cache import CacheStore, Channel, PartWriter
from streamtap.cache.index import Index
from streamtap.errors import CacheBusy, NotEnoughSpace


def fail_after_insert(index: Index) -> None:
    with index.writing() as db:
        db.execute("INSERT INTO memo VALUES ('c', '1')")
        assert db.kept("count", lambda: 3) == 3
        raise ZeroDivisionError


def test_a_transaction_that_fails_changes_nothing(tmp_path: Path) -> None:
    index = Index(tmp_path / "index.sqlite", busy_seconds=1)
    with pytest.raises(ZeroDivisionError):
        fail_after_insert(index)
    with index.reading() as db:
        assert db.execute("SELECT count(*) FROM memo").fetchone() == (0,)
    index.close()


def test_what_is_kept_is_made_again_after_any_change(tmp_path: Path) -> None:
    first, second = (Index(tmp_path / "index.sqlite", busy_seconds=5) for _ in range(2))

    def count() -> int:
        with first.reading() as db:
            return db.kept("count", lambda: int(db.execute("SELECT count(*) FROM memo").fetchone()[0]))

    assert (count(), count()) == (0, 0)
    with second.writing() as db:
        db.execute("INSERT INTO memo VALUES ('a', '1')")
    assert count() == 1
    with first.writing() as db:
        db.execute("INSERT INTO memo VALUES ('b', '1')")
    assert count() == 2
    with pytest.raises(ZeroDivisionError):
        fail_after_insert(first)
    assert count() == 2
    first.close()
    second.close()


def test_an_index_held_by_another_is_busy(store: CacheStore) -> None:
    holding, busy = store._index.writing(), pytest.raises(CacheBusy, match=r"index\.sqlite")
    with CacheStore(store.root, busy_seconds=0.05) as second, holding, busy:
        second.remember("a", {})
    store.remember("a", {"b": 1})


def test_a_full_disk_at_the_commit_leaves_the_batch_out(filled: Any, layers: list[Channel], sample: Any) -> None:
    store, set_id, made = filled
    more = sample(layers, [1] * 3000, first=100)
    with store.writer(set_id, layers) as writer:
        with store._index.reading() as db:
            pages = db.execute("PRAGMA page_count").fetchone()[0]
            db.execute(f"PRAGMA max_page_count = {pages + 1}")
        with pytest.raises(NotEnoughSpace, match="full"):
            writer.append(*more.args())
        with store._index.reading() as db:
            db.execute("PRAGMA max_page_count = 1000000")
        assert len(store.missing(set_id, more.digests, ["layer_0"])["layer_0",]) == 3000
        writer.append(*more.args())
    assert store.read(set_id, more.digests, "layer_0").values.tobytes() == more.rows["layer_0"].tobytes()
    assert store.read(set_id, made.digests, "layer_0").values.tobytes() == made.rows["layer_0"].tobytes()


def test_an_interrupt_right_after_the_commit_overwrites_nothing(
    filled: Any, layers: list[Channel], sample: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, set_id, _ = filled
    one, two = sample(layers, [4], first=100), sample(layers, [4], seed=1, first=200)
    real = PartWriter._commit

    def interrupted(self: PartWriter, written: Any) -> None:
        before = {id(part): part.next_row for part, _ in written}
        real(self, written)
        for part, _ in written:
            part.next_row = before[id(part)]
        raise KeyboardInterrupt

    with store.writer(set_id, layers) as writer:
        monkeypatch.setattr(PartWriter, "_commit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            writer.append(*one.args())
        monkeypatch.undo()
        writer.append(*two.args())
    assert store.read(set_id, one.digests, "layer_1").values.tobytes() == one.rows["layer_1"].tobytes()
    assert store.read(set_id, two.digests, "layer_1").values.tobytes() == two.rows["layer_1"].tobytes()


def test_threads_share_a_store(filled: Any) -> None:
    store, set_id, made = filled
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: store.read(set_id, made.digests, "layer_0").values.tobytes(), range(40)))
    assert set(found) == {made.rows["layer_0"].tobytes()}


def test_the_commit_is_synced(store: CacheStore) -> None:
    with store._index.reading() as db:
        assert db.execute("PRAGMA synchronous").fetchone() == (2,)
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    plain = sqlite3.connect(store.root / "index.sqlite")
    assert plain.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone() == ("1.0",)
    plain.close()
