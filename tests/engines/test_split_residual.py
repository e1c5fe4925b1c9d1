"""Blocks that hand on the stream in two parts, still to be added, and blocks that write over what they were given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from streamtap.capture.hooks import reading, visiting
from streamtap.capture.recorder import PassLayout, Recorder
from streamtap.errors import CaptureMissed

HIDDEN, TOKENS = 4, 3
GENERATOR = torch.Generator().manual_seed(0)


class SplitBlock(nn.Module):
    """As engines have it that fuse the addition with the next norm: (what the block adds, the stream before)."""

    def forward(self, added: torch.Tensor, stream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        before = stream + added
        return before * 2, before


class InPlaceBlock(nn.Module):
    """Takes the stream that was handed to it as its own to write on, and gives a new one."""

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        given = stream + 1
        stream.mul_(-7)
        return given


def layout(chosen: list[int]) -> PassLayout:
    return PassLayout((TOKENS,), (np.array(chosen, np.int32),), (0,))


@pytest.mark.parametrize("watch", [reading, visiting])
def test_a_stream_in_two_parts_is_refused_and_the_hooks_come_off(watch: Any) -> None:
    block = SplitBlock()
    parts = torch.randn(2, 1, TOKENS, HIDDEN, generator=GENERATOR)

    said = r"block 5 returned two tensors of one shape \(1, 3, 4\)"
    with pytest.raises(CaptureMissed, match=said) as caught, watch({5: block}, lambda _layer, _stream: None):
        block(*parts)

    assert caught.value.layer == 5
    assert not block._forward_hooks


@pytest.mark.parametrize("rest", [None, torch.zeros(1, 2, TOKENS, TOKENS), torch.zeros(1, TOKENS, HIDDEN).long()])
def test_what_else_a_block_returns_is_no_part_of_the_stream(rest: Any) -> None:
    stream = torch.randn(1, TOKENS, HIDDEN, generator=GENERATOR)
    block, seen = nn.Identity(), []

    with reading({0: block}, lambda _layer, output: seen.append(output)):
        block((stream, rest))

    assert seen[0] is stream


@pytest.mark.parametrize(
    ("pooling", "chosen"), [("none", [0, 1, 2]), ("none", [1]), ("mean", [0, 1, 2]), ("max", [0, 2])]
)
def test_rows_are_those_from_before_a_later_block_wrote_over_them(pooling: str, chosen: list[int]) -> None:
    blocks = nn.ModuleList([InPlaceBlock(), InPlaceBlock()])
    start = torch.randn(1, TOKENS, HIDDEN, generator=GENERATOR)
    expected = (start + 1)[0, chosen]
    recorder = Recorder(layout(chosen), [0, 1], HIDDEN, pooling)

    with torch.no_grad(), reading(dict(enumerate(blocks)), recorder.read):
        stream = start.clone()
        for block in blocks:
            stream = block(stream)

    rows = recorder.finish()
    pooled = {"none": expected, "mean": expected.sum(0, keepdim=True), "max": expected.amax(0, keepdim=True)}[pooling]
    torch.testing.assert_close(rows[0], pooled, rtol=1e-6, atol=1e-6)
    assert not torch.equal(rows[1], rows[0])
