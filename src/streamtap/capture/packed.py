"""Run tokens of many sequences in one pass, end to end in one row, with no padding.

Each sequence attends to itself alone: an attention function of ours takes the place of the model's for
the pass, and walks over the sequences. Prompts and single new tokens mix freely. Which models this
holds for is not guessed: ``passes_for`` runs two sequences both ways and compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from streamtap.capture.forward import Forward
from streamtap.capture.hooks import visiting

ATTENTION = "streamtap_packed"
_GROWTH = 1.5

#: ``visit(layer, stream [tokens, hidden], pieces, bounds)``: whose rows they are; a tensor returned goes on instead.
PieceVisitor = Callable[[int, torch.Tensor, Sequence["Piece"], Sequence[int]], torch.Tensor | None]


class States:
    """Keys and values of one sequence, [1, heads, tokens, width] for each attention module, with room to grow."""

    def __init__(self, room: int) -> None:
        self._room = max(1, room)
        self._held: dict[nn.Module, tuple[torch.Tensor, torch.Tensor]] = {}

    def extended(
        self, module: nn.Module, start: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values up to the end of the new ones, which stand from position ``start`` on."""
        stop = start + key.shape[2]
        held = self._held.get(module)
        if held is None or held[0].shape[2] < stop:
            held = self._grown(held, stop, start, key, value)
            self._held[module] = held
        held[0][:, :, start:stop] = key
        held[1][:, :, start:stop] = value
        return held[0][:, :, :stop], held[1][:, :, :stop]

    def copy(self) -> States:
        """The same states for another sequence that goes on from here."""
        twin = States(self._room)
        twin._held = {module: (key.clone(), value.clone()) for module, (key, value) in self._held.items()}
        return twin

    def _grown(self, held: Any, stop: int, start: int, key: torch.Tensor, value: torch.Tensor) -> Any:
        room = max(self._room, stop) if held is None else int(stop * _GROWTH)
        grown = tuple(new.new_empty((1, new.shape[1], room, new.shape[3])) for new in (key, value))
        if held is not None:
            for wide, old in zip(grown, held, strict=True):
                wide[:, :, :start] = old[:, :, :start]
        return grown


@dataclass
class Piece:
    """The tokens of one sequence that run in a pass: ``token_ids`` from position ``start`` on.

    ``states`` is what the sequence's earlier tokens left, or None where it runs once and never again.
    ``fresh`` is the first position whose rows are new: a pass may have to repeat earlier tokens.
    """

    token_ids: Sequence[int]
    start: int = 0
    states: States | None = None
    fresh: int = 0

    @property
    def stop(self) -> int:
        """The position after the last."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True)
class _Pass:
    pieces: Sequence[Piece]
    bounds: Sequence[int]


_CURRENT: ContextVar[_Pass] = ContextVar("streamtap_packed_pass")


class PackedPasses:
    """Passes over pieces of many sequences at once; not safe for two threads."""

    #: Whether a sequence goes on from its states, so that earlier tokens do not run again.
    resumes = True

    def __init__(self, forward: Forward) -> None:
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION, packed_attention)
        self.forward = forward
        configs = {id(module.config): module.config for module in forward.model.modules() if hasattr(module, "config")}
        self._configs: list[Any] = list(configs.values())

    def run(self, pieces: Sequence[Piece], visit: PieceVisitor, layers: Sequence[int]) -> torch.Tensor:
        """The normed stream [tokens, hidden] of all pieces, one after another; ``visit`` sees ``layers`` on the way."""
        bounds = _bounds(pieces)
        ids = torch.tensor([[token for piece in pieces for token in piece.token_ids]], device=self.forward.device)
        places = [torch.arange(piece.start, piece.stop) for piece in pieces]
        positions = torch.cat(places)[None].to(self.forward.device)

        def look(layer: int, stream: torch.Tensor) -> torch.Tensor | None:
            changed = visit(layer, stream[0], pieces, bounds)
            return None if changed is None else changed[None]

        watched = {layer: self.forward.blocks.modules[layer] for layer in layers}
        with torch.no_grad(), self._attending(_Pass(pieces, bounds)), visiting(watched, look):
            output = self.forward.blocks.body(input_ids=ids, position_ids=positions, use_cache=False)
        normed: torch.Tensor = output[0][0]
        return normed

    @contextmanager
    def _attending(self, current: _Pass) -> Iterator[None]:
        before = [config._attn_implementation for config in self._configs]
        token = _CURRENT.set(current)
        try:
            for config in self._configs:
                config._attn_implementation = ATTENTION
            yield
        finally:
            for config, name in zip(self._configs, before, strict=True):
                config._attn_implementation = name
            _CURRENT.reset(token)


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_other: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of the pieces of the current pass, each over its own sequence.

    ``query`` is [1, heads, tokens, width], ``key`` and ``value`` [1, key heads, tokens, width]; gives
    [1, tokens, heads, width]. ``s_aux`` are attention sinks, one logit a head.
    """
    now = _CURRENT.get()
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    special = softcap is not None or s_aux is not None
    parts = []
    for piece, start, stop in zip(now.pieces, now.bounds, now.bounds[1:], strict=False):
        q, k, v = (each[:, :, start:stop] for each in (query, key, value))
        if piece.states is not None:
            k, v = piece.states.extended(module, piece.start, k, v)
        if sliding_window and q.shape[2] == 1:
            k, v = k[:, :, -sliding_window:], v[:, :, -sliding_window:]
        mask = _mask(q.shape[2], k.shape[2], sliding_window, q.device)
        parts.append(_spelled_out(q, k, v, mask, scale, softcap, s_aux) if special else _fused(q, k, v, mask, scale))
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


def _mask(new: int, held: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Which of ``held`` keys the last ``new`` positions see, bool [new, held]; None where plain causality says it."""
    if new == 1 or (new == held and not (window and held > window)):
        return None
    rows = torch.arange(held - new, held, device=device)[:, None]
    columns = torch.arange(held, device=device)[None, :]
    seen = columns <= rows
    return seen & (columns > rows - window) if window else seen


def _fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, scale: float) -> torch.Tensor:
    causal = mask is None and q.shape[2] > 1
    grouped = q.shape[1] != k.shape[1]
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )


def _spelled_out(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, scale: float, softcap: float | None, sinks: Any
) -> torch.Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(groups, dim=1) if groups > 1 else each for each in (k, v))
    scores = (q @ k.transpose(2, 3)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is None and q.shape[2] > 1:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        sink = sinks.reshape(1, -1, 1, 1).to(scores.dtype).expand(1, -1, q.shape[2], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(q.dtype)
    return (weights if sinks is None else weights[..., :-1]) @ v


def _bounds(pieces: Sequence[Piece]) -> list[int]:
    bounds = [0]
    for piece in pieces:
        bounds.append(bounds[-1] + len(piece.token_ids))
    return bounds
