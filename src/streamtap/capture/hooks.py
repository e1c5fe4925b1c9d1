"""Hooks on the blocks: they come off whatever happens. Some only read and may stop the pass early, some also change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from streamtap.errors import CaptureMissed

Reader = Callable[[int, torch.Tensor], None]
#: Sees a block's output [batch, positions, hidden]; what it returns, unless None, takes that output's place.
Visitor = Callable[[int, torch.Tensor], torch.Tensor | None]


class _PassIsOver(Exception):
    """Raised by the last block that is asked for; never leaves this module."""


@contextmanager
def reading(blocks: Mapping[int, nn.Module], read: Reader, stop_after: int | None = None) -> Iterator[None]:
    """Call ``read(layer, output)`` at every block's output [batch, positions, hidden] inside the ``with``.

    With ``stop_after`` the forward pass ends, quietly, once that block has been read, so that
    nothing behind it is computed.
    """

    def hook_of(layer: int) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            read(layer, residual_of(output, layer))
            if layer == stop_after:
                raise _PassIsOver

        return hook

    handles = [block.register_forward_hook(hook_of(layer)) for layer, block in blocks.items()]
    try:
        yield
    except _PassIsOver:
        pass
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def visiting(blocks: Mapping[int, nn.Module], visit: Visitor) -> Iterator[None]:
    """Call ``visit(layer, output)`` at every block's output inside the ``with``, and go on with what it returns."""

    def hook_of(layer: int) -> Callable[[nn.Module, Any, Any], Any]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> Any:
            changed = visit(layer, residual_of(output, layer))
            return None if changed is None else _with_residual(output, changed)

        return hook

    handles = [block.register_forward_hook(hook_of(layer)) for layer, block in blocks.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _with_residual(output: Any, stream: torch.Tensor) -> Any:
    return stream if isinstance(output, torch.Tensor) else type(output)([stream, *output[1:]])


def residual_of(output: Any, layer: int) -> torch.Tensor:
    """The residual stream [batch, positions, hidden] in what a block returned: a tensor, or a tuple led by one.

    Raises:
        CaptureMissed: it is neither, has other axes, or comes in two parts.
    """
    first = output[0] if isinstance(output, tuple | list) and output else output
    if isinstance(first, torch.Tensor) and first.ndim == 3:
        if first is not output and any(_is_like(first, each) for each in output[1:]):
            raise CaptureMissed(
                f"block {layer} returned two tensors of one shape {tuple(first.shape)}: the residual stream may be "
                "their sum, still to be added, and one of them is not it.",
                layer=layer,
            )
        return first
    shape = f"a tensor of shape {tuple(first.shape)}" if isinstance(first, torch.Tensor) else type(first).__name__
    raise CaptureMissed(f"block {layer} returned {shape}; expected [batch, positions, hidden].", layer=layer)


def _is_like(stream: torch.Tensor, other: Any) -> bool:
    return isinstance(other, torch.Tensor) and other.shape == stream.shape and other.is_floating_point()
