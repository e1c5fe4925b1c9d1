"""Hooks read, stop early, and always come off."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from streamtap.capture.hooks import reading, residual_of
from streamtap.errors import CaptureMissed


class Chain(nn.Module):
    """Three blocks that each double, in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(3))
        self.ran: list[int] = []
        for k, block in enumerate(self.blocks):
            nn.init.constant_(block.weight, 1.0)  # type: ignore[arg-type]
            block.register_forward_pre_hook(lambda _m, _i, k=k: self.ran.append(k))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        self.ran.append(99)
        return x


X = torch.ones(1, 1, 2)


def hooks_of(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


def read_all(model: Chain, layers: list[int], stop_after: int | None = None) -> dict[int, float]:
    seen: dict[int, float] = {}
    blocks = {layer: model.blocks[layer] for layer in layers}
    with torch.no_grad(), reading(blocks, lambda k, out: seen.update({k: float(out[0, 0, 0])}), stop_after):
        model(X)
    return seen


def test_every_watched_block_is_read_in_order_and_the_rest_left_alone() -> None:
    model = Chain()

    assert list(read_all(model, [0, 2]).items()) == [(0, 2.0), (2, 8.0)]
    assert model.ran == [0, 1, 2, 99]
    assert hooks_of(model) == 0


@pytest.mark.parametrize(("stop", "ran"), [(0, [0]), (1, [0, 1]), (2, [0, 1, 2])])
def test_the_pass_ends_quietly_behind_the_last_block(stop: int, ran: list[int]) -> None:
    model = Chain()

    assert read_all(model, list(range(stop + 1)), stop) == {k: 2.0 ** (k + 1) for k in range(stop + 1)}
    assert model.ran == ran
    assert hooks_of(model) == 0


def test_the_block_to_stop_behind_has_been_read() -> None:
    assert read_all(Chain(), [1], 1) == {1: 4.0}


@pytest.mark.parametrize("error", [ValueError("reader"), KeyboardInterrupt(), torch.OutOfMemoryError("full")], ids=repr)
def test_hooks_come_off_whatever_the_reader_raises(error: BaseException) -> None:
    model = Chain()

    def read(_layer: int, _output: torch.Tensor) -> None:
        raise error

    with pytest.raises(type(error)), reading({0: model.blocks[0]}, read, 0):
        model(X)
    assert hooks_of(model) == 0


def test_hooks_come_off_when_the_pass_fails_and_its_error_is_passed_on() -> None:
    model = Chain()

    with pytest.raises(RuntimeError, match="shapes"), reading({0: model.blocks[0]}, lambda *_: None, 0):
        model(torch.ones(1, 1, 5))
    assert hooks_of(model) == 0


def test_nothing_is_changed_by_being_read() -> None:
    model = Chain()
    plain = model(X)

    with reading(dict(enumerate(model.blocks)), lambda _k, _out: None):
        read = model(X)

    assert torch.equal(plain, read)
    assert read.requires_grad


def test_hooks_of_others_stay() -> None:
    model = Chain()
    handle = model.blocks[1].register_forward_hook(lambda *_: None)

    read_all(model, [0, 1, 2], 2)

    assert hooks_of(model) == 1
    handle.remove()


@pytest.mark.parametrize("output", [X, (X,), [X, None], (X, (X, X))], ids=["tensor", "tuple", "list", "cache"])
def test_the_stream_is_the_tensor_or_leads_the_tuple(output: Any) -> None:
    assert residual_of(output, 0) is X


@pytest.mark.parametrize(
    ("output", "what"),
    [
        (X[0], r"a tensor of shape \(1, 2\)"),
        (X[None], r"a tensor of shape \(1, 1, 1, 2\)"),
        ((), "tuple"),
        (None, "NoneType"),
        ((None, X), "NoneType"),
        ({"hidden": X}, "dict"),
        (((X,),), "tuple"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_any_other_output_is_refused_with_what_it_is(output: Any, what: str) -> None:
    with pytest.raises(
        CaptureMissed, match=rf"block 4 returned {what}; expected \[batch, positions, hidden\]"
    ) as caught:
        residual_of(output, 4)
    assert caught.value.layer == 4
