"""The store as a program sees it: round trips, what is missing, memos, sets."""

from __future__ import annotations

import json
import re
import sqlite3
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamtap.cache import CacheStore, Channel, PromptKey
from streamtap.errors import CacheDamaged, InvalidInput, NotCached, Unsupported
from streamtap.fingerprint import tokens_digest

DOCS = Path(__file__).parents[2] / "docs" / "cache.md"


def same_bytes(left: Any, right: Any) -> bool:
    return bool(left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes())


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    dtype=st.sampled_from(["float16", "float32", "float64", "bfloat16", "int32"]),
    widths=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    counts=st.lists(st.integers(0, 7), min_size=1, max_size=12),
    cuts=st.lists(st.integers(0, 12), max_size=3),
    seed=st.integers(0, 10**6),
)
def test_round_trip_in_any_order(
    tmp_path_factory: pytest.TempPathFactory,
    sample: Any,
    dtype: str,
    widths: list[int],
    counts: list[int],
    cuts: list[int],
    seed: int,
) -> None:
    channels = [Channel(f"c{number}", dtype, width) for number, width in enumerate(widths)]
    made = sample(channels, counts, seed)
    order = np.random.default_rng(seed).integers(0, len(counts), 2 * len(counts)).tolist()
    edges = sorted({0, len(counts), *(cut for cut in cuts if cut < len(counts))})
    with CacheStore(tmp_path_factory.mktemp("round") / "cache") as store:
        set_id = store.ensure_set({"seed": seed}, {})
        with store.writer(set_id, channels) as writer:
            for start, stop in pairwise(edges):
                writer.append(*made.args(start, stop))
        for channel in channels:
            rows = store.read(set_id, [made.digests[place] for place in order], channel.name)
            expected = np.concatenate([made.of(place, channel.name) for place in order])
            assert same_bytes(rows.values, expected)
            assert np.diff(rows.offsets).tolist() == [counts[place] for place in order]
            whole = store.read_all(set_id, channel.name)
            assert sorted(whole.digests) == sorted(made.digests)
            assert same_bytes(whole.values, np.concatenate([made.of(i, channel.name) for i in range(len(counts))]))


def test_rows_cross_chunks_and_carry_their_tokens(store: CacheStore, sample: Any) -> None:
    channels = [Channel("wide", "float32", 8192)]
    made = sample(channels, [5, 9, 1, 20])
    set_id = store.ensure_set({}, {})
    with store.writer(set_id, channels) as writer:
        writer.append(*made.args(0, 2))
        writer.append(*made.args(2, 4))
    rows = store.read(set_id, made.digests, "wide")
    assert same_bytes(rows.values, made.rows["wide"])
    assert same_bytes(rows.token_ids, made.token_ids)
    assert same_bytes(rows.positions, made.positions)
    (view,) = store.view(set_id, "wide")
    assert view.values.shape == (5, 8, 8192)
    last = view.digests.index(made.digests[3])
    numbers = view.first_rows[last] + np.arange(20)
    assert same_bytes(view.values[numbers // 8, numbers % 8], made.of(3, "wide"))
    assert not view.values.flags.writeable


def test_missing_is_per_prompt_and_channel(store: CacheStore, sample: Any, layers: list[Channel]) -> None:
    made = sample(layers, [1] * 10)
    set_id = store.ensure_set({}, {})
    names = [channel.name for channel in layers]
    assert store.missing(set_id, made.digests, names) == {tuple(names): list(range(10))}
    with store.writer(set_id, layers[1:2]) as writer:
        writer.append(*made.args(0, 6, ["layer_1"]))
    assert store.missing(set_id, made.digests, names) == {
        ("layer_0", "layer_2"): [0, 1, 2, 3, 4, 5],
        tuple(names): [6, 7, 8, 9],
    }
    assert store.missing(set_id, made.digests[:6], ["layer_1"]) == {}
    with store.writer(set_id, [layers[0], layers[2]]) as writer:
        writer.append(*made.args(0, 6, ["layer_0", "layer_2"]))
    assert store.missing(set_id, made.digests, names) == {tuple(names): [6, 7, 8, 9]}
    assert store.missing(set_id, [made.digests[0], made.digests[9], made.digests[9]], names) == {tuple(names): [1, 2]}
    for name in names:
        assert same_bytes(store.read(set_id, made.digests[:6], name).values, made.rows[name][:6])


def test_few_of_many_prompts_are_found_one_by_one(store: CacheStore, sample: Any) -> None:
    channels = [Channel("a", "float32", 4)]
    made = sample(channels, [2] * 200)
    set_id = store.ensure_set({}, {})
    with store.writer(set_id, channels) as writer:
        writer.append(*made.args())
    rows = store.read(set_id, [made.digests[199], made.digests[3]], "a")
    assert same_bytes(rows.values, np.concatenate([made.of(199, "a"), made.of(3, "a")]))
    other = sample(channels, [1], first=999).digests[0]
    assert store.missing(set_id, [made.digests[5], other], ["a"]) == {("a",): [1]}


def test_what_is_not_there_is_counted_and_named(filled: Any, sample: Any, layers: list[Channel]) -> None:
    store, set_id, made = filled
    strangers = sample(layers, [1, 1], first=500).digests
    with pytest.raises(NotCached, match=r"2 of 3 prompts .* prompts 0, 2\."):
        store.read(set_id, [strangers[0], made.digests[0], strangers[1]], "layer_1")
    with pytest.raises(NotCached, match="layer_9"):
        store.read(set_id, made.digests, "layer_9")
    with pytest.raises(NotCached, match="layer_9"):
        store.read_all(set_id, "layer_9")


def test_a_new_store_sees_what_another_wrote_meanwhile(filled: Any, sample: Any, layers: list[Channel]) -> None:
    store, set_id, made = filled
    assert len(store.read_all(set_id, "layer_0").digests) == 6
    more = sample(layers, [2, 2], seed=5, first=50)
    with CacheStore(store.root) as second, second.writer(set_id, layers) as writer:
        writer.append(*more.args())
    whole = store.read_all(set_id, "layer_0")
    assert set(whole.digests) == {*made.digests, *more.digests}
    assert same_bytes(whole.values, np.concatenate([made.rows["layer_0"], more.rows["layer_0"]]))


@pytest.mark.parametrize("change", ["model", "dtype", "pooling", "template"])
def test_any_change_of_identity_is_another_set(store: CacheStore, change: str) -> None:
    identity = {"model": "a@1", "dtype": "float32", "pooling": "mean", "template": "x"}
    set_id = store.ensure_set(identity, {"engine": "test"})
    assert store.find_set(dict(reversed(identity.items()))) == set_id == store.ensure_set(identity, {})
    assert store.find_set({**identity, change: "other"}) is None
    assert store.ensure_set({**identity, change: "other"}, {}) != set_id


def test_sets_say_what_they_hold(filled: Any, layers: list[Channel]) -> None:
    store, set_id, _ = filled
    empty = store.ensure_set({"model": "b"}, {})
    first, second = store.sets()
    assert (first.id, first.prompts, first.rows, first.channels) == (set_id, 6, 15, tuple(layers))
    assert (first.identity, first.provenance) == ({"model": "a"}, {"engine": "test"})
    assert 0 < first.bytes <= store.size_bytes()
    assert (second.id, second.prompts, second.rows, second.bytes) == (empty, 0, 0, 0)


def test_texts_and_tokens_are_remembered(store: CacheStore) -> None:
    ids = [np.arange(number, dtype=np.int32) for number in range(1, 4)]
    own = np.array([2, 4], np.int32)
    keys = [PromptKey(tokens_digest(each), each) for each in ids]
    keys[2] = PromptKey(tokens_digest(ids[2], own), ids[2], own)
    context, texts = b"c" * 16, [bytes([number]) * 16 for number in range(3)]
    store.remember_texts(context, texts, keys, [0, 900, 0])
    asked = [texts[1], b"?" * 16, texts[0], texts[1]]
    first, second = (keys[0].digest, 0), (keys[1].digest, 900)
    assert store.recall_texts(context, asked) == [second, None, first, second]
    assert store.recall_texts(b"d" * 16, texts) == [None, None, None]
    assert [each.tolist() for each in store.token_ids([keys[2].digest, keys[0].digest])] == [[0, 1, 2], [0]]
    positions = store.own_positions([keys[0].digest, keys[2].digest])
    assert positions[0] is None
    assert positions[1] is not None
    assert positions[1].tolist() == [2, 4]
    with pytest.raises(NotCached, match="1 of 2"):
        store.token_ids([keys[0].digest, b"?" * 16])
    with pytest.raises(InvalidInput, match="16 bytes"):
        store.remember_texts(context, [b"short"], keys[:1], [0])
    with pytest.raises(InvalidInput, match="one key and note"):
        store.remember_texts(context, texts, keys[:1], [0])


def test_memos(store: CacheStore) -> None:
    assert store.recall("model") is None
    store.remember("model", {"layers": 30})
    store.remember("model", {"layers": 31, "name": "é"})
    assert store.recall("model") == {"layers": 31, "name": "é"}


def test_a_newer_index_is_refused(store: CacheStore) -> None:
    store.close()
    with sqlite3.connect(store.root / "index.sqlite") as db:
        db.execute("UPDATE meta SET value = '2.0' WHERE key = 'schema'")
    db.close()
    with pytest.raises(Unsupported, match=r"schema 2\.0"):
        CacheStore(store.root)


def test_an_index_that_is_no_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "index.sqlite").write_bytes(b"this is not a database, but long enough to be read as one" * 40)
    with pytest.raises(CacheDamaged, match=r"index\.sqlite"):
        CacheStore(tmp_path)


def test_the_snippet_of_the_docs_reads_a_real_part(store: CacheStore, sample: Any) -> None:
    channels = [Channel("layer_7", "bfloat16", 6), Channel("layer_8", "bfloat16", 6)]
    made = sample(channels, [2, 3, 1])
    set_id = store.ensure_set({"model": "a"}, {})
    with store.writer(set_id, channels) as writer:
        writer.append(*made.args())
    snippet = re.search(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert snippet
    found: dict[str, Any] = {"folder": store.root, "channel": "layer_7"}
    exec(snippet[1], found)  # the docs are ours, and what they show must run
    assert np.array_equal(found["rows"], made.rows["layer_7"].astype(np.float32), equal_nan=True)
    assert found["prompts"] == [(made.digests[i], int(made.offsets[i]), n) for i, n in enumerate([2, 3, 1])]


def test_the_layout_stands_beside_the_part(filled: Any) -> None:
    store = filled[0]
    described = json.loads((store.root / "parts" / "part_000001.json").read_text())
    assert [name for name, *_ in described["channels"]] == ["layer_0", "layer_1", "layer_2"]
