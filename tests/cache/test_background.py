"""One thread that writes beside the model."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from streamtap.cache import BackgroundWriter, CacheStore, Channel, PartWriter
from streamtap.errors import InvalidInput


def test_everything_is_committed_at_the_end(store: CacheStore, layers: list[Channel], sample: Any) -> None:
    made = sample(layers, [2] * 10)
    set_id = store.ensure_set({}, {})
    with BackgroundWriter(store.writer(set_id, layers)) as writer:
        for place in range(10):
            writer.append(*made.args(place, place + 1))
    assert store.read(set_id, made.digests, "layer_1").values.tobytes() == made.rows["layer_1"].tobytes()


def test_flush_commits_what_was_handed_over(store: CacheStore, layers: list[Channel], sample: Any) -> None:
    made = sample(layers, [2, 2])
    set_id = store.ensure_set({}, {})
    with BackgroundWriter(store.writer(set_id, layers)) as writer:
        writer.append(*made.args())
        writer.flush()
        assert store.missing(set_id, made.digests, ["layer_0"]) == {}


def test_an_error_is_raised_by_the_next_call_and_only_its_batch_is_lost(
    store: CacheStore, layers: list[Channel], sample: Any
) -> None:
    made = sample(layers, [1, 1, 1])
    set_id = store.ensure_set({}, {})
    writer = BackgroundWriter(store.writer(set_id, layers))
    writer.append(*made.args(0, 1))
    writer.append(*made.args(1, 2, ["layer_0"]))
    with pytest.raises(InvalidInput, match="takes channels"):
        writer.flush()
    writer.append(*made.args(2, 3))
    writer.close()
    writer.close()
    assert store.missing(set_id, made.digests, ["layer_0"]) == {("layer_0",): [1]}


def test_close_raises_what_no_later_call_did(store: CacheStore, layers: list[Channel], sample: Any) -> None:
    set_id = store.ensure_set({}, {})
    writer = BackgroundWriter(store.writer(set_id, layers))
    writer.append(*sample(layers, [1]).args(names=["layer_0"]))
    with pytest.raises(InvalidInput, match="takes channels"):
        writer.close()


def test_a_failing_body_still_commits_and_keeps_its_own_error(
    store: CacheStore, layers: list[Channel], sample: Any
) -> None:
    made = sample(layers, [1, 1])
    set_id = store.ensure_set({}, {})

    def body() -> None:
        with BackgroundWriter(store.writer(set_id, layers)) as writer:
            writer.append(*made.args(0, 1))
            writer.append(*made.args(1, 2, ["layer_0"]))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        body()
    assert store.missing(set_id, made.digests, ["layer_0"]) == {("layer_0",): [1]}
    assert "takes channels" in caught.value.__notes__[0]


def test_the_second_batch_waits_for_the_first(
    store: CacheStore, layers: list[Channel], sample: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = sample(layers, [1, 1, 1])
    set_id = store.ensure_set({}, {})
    gate, real = threading.Event(), PartWriter.append

    def held(self: PartWriter, *args: Any) -> None:
        assert gate.wait(10)
        real(self, *args)

    monkeypatch.setattr(PartWriter, "append", held)
    with BackgroundWriter(store.writer(set_id, layers)) as writer:
        writer.append(*made.args(0, 1))
        second = threading.Thread(target=writer.append, args=made.args(1, 2))
        second.start()
        second.join(0.2)
        assert second.is_alive()
        gate.set()
        second.join(10)
        assert not second.is_alive()
        writer.append(*made.args(2, 3))
    assert store.missing(set_id, made.digests, ["layer_0"]) == {}
