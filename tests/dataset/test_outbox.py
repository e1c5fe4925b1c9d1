"""Shards on their way: beside the packing or after it, and what a failure in the sender's thread does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from streamtap.dataset.manifest import Shard
from streamtap.dataset.outbox import Outbox
from streamtap.dataset.shard_chain import ShardChain
from streamtap.errors import InvalidInput, TransferFailed

Make = Callable[..., Any]
SHAPES = {"t": (np.dtype(np.float32), (1, 2))}
ROW = np.zeros((1, 2), np.float32)

pytestmark = pytest.mark.usefixtures("no_thread_left")


def fill(outbox: Outbox, *names: str) -> None:
    for name in names:
        with outbox.shard(f"tensors/{name}.safetensors", SHAPES) as shard:
            shard.write(ROW)


def test_all_are_packed_before_the_first_is_sent(recording: Make) -> None:
    target = recording()
    with Outbox(target, stream=False) as outbox:
        fill(outbox, *"abcdef")
        assert target.calls == []
        sums = outbox.finish()

    assert target.calls == [f"put tensors/{name}.safetensors" for name in "abcdef"]
    assert list(sums) == [f"tensors/{name}.safetensors" for name in "abcdef"]
    assert {each.size_bytes for each in sums.values()} == {(target.sent / "tensors/a.safetensors").stat().st_size}


def test_streamed_shards_are_sent_while_the_next_is_packed(recording: Make) -> None:
    target = recording()
    begun, go_on = threading.Event(), threading.Event()
    put = target.put

    def slow(*args: Any, **how: Any) -> None:
        begun.set()
        assert go_on.wait(10)
        put(*args, **how)

    target.put = slow
    with Outbox(target, stream=True) as outbox:
        fill(outbox, "a", "b")
        assert begun.wait(10)
        assert target.calls == []
        with outbox.shard("tensors/c.safetensors", SHAPES) as third:
            third.write(ROW)
            # One is being sent and one waits; a fourth would have to wait for room.
            assert len(list(target.rooms.rglob("*.safetensors"))) == 3
            go_on.set()
        fill(outbox, *"def")
        outbox.finish()

    assert len(target.calls) == 6
    assert target.most_files == 3


@pytest.mark.parametrize("stream", [False, True], ids=["packed first", "streamed"])
@pytest.mark.parametrize("fail_at", [0, 1, 4])
def test_an_error_of_the_sender_reaches_the_caller_and_nothing_more_is_sent(
    stream: bool, fail_at: int, recording: Make
) -> None:
    target = recording(fail_at=fail_at)

    def push() -> None:
        with Outbox(target, stream=stream) as outbox:
            fill(outbox, *"abcdefghij")
            outbox.finish()

    with pytest.raises(TransferFailed, match=f"put tensors/{'abcde'[fail_at]}.safetensors failed"):
        push()
    assert len(target.calls) == fail_at + 1


def test_an_error_of_the_caller_stops_the_sending(recording: Make) -> None:
    target = recording(seconds=0.05)

    def push() -> None:
        with Outbox(target, stream=True) as outbox:
            fill(outbox, *"ab")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        push()
    assert len(target.calls) <= 1


def test_a_shard_that_is_not_whole_is_removed_and_not_sent(recording: Make) -> None:
    target = recording()
    shapes = {"t": (np.dtype(np.float32), (2, 2))}
    with Outbox(target, stream=False) as outbox:
        with (
            pytest.raises(InvalidInput, match="1 rows that this shard announced"),
            outbox.shard("tensors/a.safetensors", shapes) as shard,
        ):
            shard.write(ROW)
        with pytest.raises(InvalidInput, match="the next rows"), outbox.shard("tensors/b.safetensors", shapes) as shard:
            shard.write(ROW[:, :1])
        assert outbox.finish() == {}

    assert target.calls == []
    assert list(target.rooms.rglob("*.safetensors")) == []


def chain(outbox: Outbox, *rows: int) -> ShardChain:
    paths = [f"tensors/{number}.safetensors" for number in range(len(rows))]
    return ShardChain(outbox, paths, [Shard(each, each) for each in rows], ("t", np.dtype(np.float32), 2))


@pytest.mark.parametrize("blocks", [[6], [1] * 6, [5, 1], [2, 4], [0, 3, 0, 3]])
def test_blocks_are_cut_into_shards(blocks: list[int], recording: Make) -> None:
    target, rows = recording(), np.arange(12, dtype=np.float32).reshape(6, 2)
    with Outbox(target, stream=False) as outbox:
        whole = chain(outbox, 2, 3, 1)
        for stop, count in zip(np.cumsum(blocks), blocks, strict=True):
            whole.write(rows[stop - count : stop])
        whole.close()
        outbox.finish()

    sent = [(target.sent / f"tensors/{number}.safetensors").read_bytes() for number in range(3)]
    assert [content[8 + int.from_bytes(content[:8], "little") :] for content in sent] == [
        rows[:2].tobytes(),
        rows[2:5].tobytes(),
        rows[5:].tobytes(),
    ]


def test_a_chain_left_in_the_middle_is_abandoned(recording: Make) -> None:
    target = recording()
    with Outbox(target, stream=False) as outbox:
        broken = chain(outbox, 2, 3)
        broken.write(np.zeros((4, 2), np.float32))
        broken.close()
        assert list(outbox.finish()) == ["tensors/0.safetensors"]

    assert list(target.rooms.rglob("*.safetensors")) == []
