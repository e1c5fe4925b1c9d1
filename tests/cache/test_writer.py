"""Writing: nothing twice, whole batches or nothing, and no more bytes than the rows need."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamtap.cache import CacheStore, Channel
from streamtap.errors import InvalidInput, NotEnoughSpace


def test_what_is_there_is_not_written_twice(filled: Any, layers: list[Channel], sample: Any) -> None:
    store, set_id, made = filled
    other = sample(layers, [3, 1, 0, 5, 2, 4, 2], seed=9)
    with store.writer(set_id, layers) as writer:
        writer.append(*other.args())
    rows = store.read(set_id, other.digests, "layer_0")
    assert rows.values[:15].tobytes() == made.rows["layer_0"].tobytes()
    assert rows.values[15:].tobytes() == other.of(6, "layer_0").tobytes()
    assert store.sets()[0].rows == 17


def test_only_missing_channels_are_written(store: CacheStore, layers: list[Channel], sample: Any) -> None:
    made = sample(layers, [2, 2])
    set_id = store.ensure_set({}, {})
    with store.writer(set_id, layers[:1]) as writer:
        writer.append(*made.args(0, 1, ["layer_0"]))
    other = sample(layers, [2, 2], seed=3)
    with store.writer(set_id, layers) as writer:
        writer.append(*other.args())
    first = store.read(set_id, made.digests, "layer_0").values
    assert first[:2].tobytes() == made.of(0, "layer_0").tobytes()
    assert first[2:].tobytes() == other.of(1, "layer_0").tobytes()
    assert store.read(set_id, made.digests, "layer_2").values.tobytes() == other.rows["layer_2"].tobytes()
    assert sum(len(view.digests) for view in store.view(set_id, "layer_0")) == 2


def test_a_prompt_twice_in_a_batch_is_stored_once(store: CacheStore, layers: list[Channel], sample: Any) -> None:
    made = sample(layers, [2, 2, 2])
    made.keys[2] = made.keys[0]
    set_id = store.ensure_set({}, {})
    with store.writer(set_id, layers) as writer:
        writer.append(*made.args())
    assert store.sets()[0].rows == 4
    assert store.read(set_id, made.digests[:2], "layer_1").values.tobytes() == made.rows["layer_1"][:4].tobytes()


def test_writers_share_few_parts(store: CacheStore, layers: list[Channel], sample: Any) -> None:
    set_id = store.ensure_set({}, {})
    with store.writer(set_id, layers) as one, store.writer(set_id, layers) as two:
        one.append(*sample(layers, [1], first=1).args())
        two.append(*sample(layers, [1], first=2).args())
    for number in range(3, 6):
        with store.writer(set_id, layers[::-1]) as writer:
            writer.append(*sample(layers, [1], first=number).args())
    assert len(list((store.root / "parts").glob("*.bin"))) == 2
    assert len(store.read_all(set_id, "layer_1").digests) == 5


def test_a_full_part_takes_no_more_rows(tmp_path: Path, layers: list[Channel], sample: Any) -> None:
    with CacheStore(tmp_path, part_bytes=1) as store:
        set_id = store.ensure_set({}, {})
        made = sample(layers, [4] * 5)
        with store.writer(set_id, layers) as writer:
            for start in range(5):
                writer.append(*made.args(start, start + 1))
        assert len(list((tmp_path / "parts").glob("*.bin"))) == 5
        assert store.read(set_id, made.digests, "layer_2").values.tobytes() == made.rows["layer_2"].tobytes()


def test_a_full_disk_leaves_the_batch_out_and_the_cache_sound(
    filled: Any, layers: list[Channel], sample: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, set_id, made = filled
    more = sample(layers, [3, 3], seed=4, first=40)
    real, calls = os.pwrite, iter(range(10**6))

    def full(fd: int, data: Any, offset: int) -> int:
        if next(calls) == 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, offset)

    with store.writer(set_id, layers) as writer:
        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(NotEnoughSpace, match="full"):
            writer.append(*more.args())
        monkeypatch.undo()
        assert list(store.missing(set_id, more.digests, ["layer_0"]).values()) == [[0, 1]]
        assert store.verify().sound
        writer.append(*more.args())
    assert store.read(set_id, more.digests, "layer_1").values.tobytes() == more.rows["layer_1"].tobytes()
    assert store.read(set_id, made.digests, "layer_1").values.tobytes() == made.rows["layer_1"].tobytes()
    assert store.verify().sound


def test_short_writes_are_finished(
    store: CacheStore, layers: list[Channel], sample: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:7], offset))
    made = sample(layers, [3, 2])
    set_id = store.ensure_set({}, {})
    with store.writer(set_id, layers) as writer:
        writer.append(*made.args())
    assert store.read(set_id, made.digests, "layer_2").values.tobytes() == made.rows["layer_2"].tobytes()


def test_occupied_bytes_are_the_payload(store: CacheStore, sample: Any) -> None:
    channels = [Channel(f"layer_{number}", "float32", 576) for number in range(4)]
    set_id = store.ensure_set({}, {})
    with store.writer(set_id, channels) as writer:
        for start in range(0, 600, 100):
            writer.append(*sample(channels, [1] * 100, first=start).args())
    payload = 600 * 4 * 576 * 4
    chunk = 4 * (1 << 18)
    assert payload <= store.sets()[0].bytes <= 1.01 * payload + chunk


def test_a_slice_of_a_wide_array_is_stored_alone(store: CacheStore, sample: Any) -> None:
    channel = Channel("a", "float32", 3)
    made = sample([channel], [2, 2])
    wide = np.zeros((4, 300), np.float32)
    wide[:, 100:103] = made.rows["a"]
    made.rows["a"] = wide[:, 100:103]
    set_id = store.ensure_set({}, {})
    with store.writer(set_id, [channel]) as writer:
        writer.append(*made.args())
    assert store.read(set_id, made.digests, "a").values.tobytes() == np.ascontiguousarray(made.rows["a"]).tobytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: (a[0], {**a[1], "extra": a[1]["layer_0"]}, *a[2:]), "takes channels"),
        (lambda a: (a[0], {**a[1], "layer_0": a[1]["layer_0"].astype(np.float64)}, *a[2:]), "float32"),
        (lambda a: (a[0], {**a[1], "layer_0": a[1]["layer_0"][:-1]}, *a[2:]), "layer_0"),
        (lambda a: (*a[:2], a[2][:-1], *a[3:]), "offsets"),
        (lambda a: (*a[:2], a[2][::-1], *a[3:]), "offsets"),
        (lambda a: (*a[:3], a[3].astype(np.int64), a[4]), "token_ids"),
        (lambda a: (*a[:4], a[4][1:]), "positions"),
    ],
)
def test_what_does_not_fit_is_refused(
    store: CacheStore, layers: list[Channel], sample: Any, change: Any, message: str
) -> None:
    set_id = store.ensure_set({}, {})
    made = sample(layers, [2, 1])
    with store.writer(set_id, layers) as writer, pytest.raises(InvalidInput, match=message):
        writer.append(*change(made.args()))
    assert store.sets()[0].prompts == 0


def test_a_channel_keeps_its_kind_within_a_set(filled: Any) -> None:
    store, set_id, _ = filled
    with pytest.raises(InvalidInput, match="layer_1"):
        store.writer(set_id, [Channel("layer_1", "float16", 12)])
    with pytest.raises(InvalidInput, match="set 77"):
        store.writer(77, [Channel("layer_1", "float32", 12)])
