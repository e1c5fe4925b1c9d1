"""Which way a model can run pieces of many sequences: packed into one pass, or each whole and by itself."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

import torch

from streamtap.capture.forward import Forward
from streamtap.capture.hooks import visiting
from streamtap.capture.packed import PackedPasses, Piece, PieceVisitor, States

_LOG = logging.getLogger(__name__)
_PROBE_TOKENS = (19, 11)
# More than rounding between the two ways means that the model attends by other means than ours.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_TOLERANCE_HALF = 0.2
_CANNOT = (AttributeError, TypeError, ValueError, RuntimeError, IndexError, KeyError, LookupError)


class Passes(Protocol):
    """A way to run pieces."""

    @property
    def resumes(self) -> bool:
        """Whether a sequence goes on from its states; else a piece holds all its tokens from position 0."""
        ...

    def run(self, pieces: Sequence[Piece], visit: PieceVisitor, layers: Sequence[int]) -> torch.Tensor:
        """The normed stream [tokens, hidden] of all pieces; ``visit`` sees and may change ``layers`` on the way."""
        ...


class LonePasses:
    """Every sequence by itself and from its beginning: slow, and right for any architecture."""

    resumes = False

    def __init__(self, forward: Forward) -> None:
        self.forward = forward

    def run(self, pieces: Sequence[Piece], visit: PieceVisitor, layers: Sequence[int]) -> torch.Tensor:
        """As ``Passes.run``, one piece after another."""
        return torch.cat([self._one(piece, visit, layers) for piece in pieces])

    def _one(self, piece: Piece, visit: PieceVisitor, layers: Sequence[int]) -> torch.Tensor:
        def look(layer: int, stream: torch.Tensor) -> torch.Tensor | None:
            changed = visit(layer, stream[0], [piece], [0, len(piece.token_ids)])
            return None if changed is None else changed[None]

        watched = {layer: self.forward.blocks.modules[layer] for layer in layers}
        ids = torch.tensor([list(piece.token_ids)], device=self.forward.device)
        with torch.no_grad(), visiting(watched, look):
            normed: torch.Tensor = self.forward.blocks.body(input_ids=ids, use_cache=False)[0][0]
        return normed


def passes_for(forward: Forward) -> Passes:
    """Packed passes where a trial shows that they give what the model gives, else lone ones."""
    packed, alone = PackedPasses(forward), LonePasses(forward)
    if follows_the_longest(forward) or _attends_in_chunks(forward):
        _LOG.info("sequences run one by one: this model treats long ones in a way that no short trial shows")
        return alone
    try:
        gap = _gap(packed, alone)
    except _CANNOT as error:
        _LOG.info("sequences run one by one: this model cannot pack them (%s)", type(error).__name__)
        return alone
    dtype = next(forward.model.parameters()).dtype
    if gap <= _TOLERANCE.get(dtype, _TOLERANCE_HALF):
        return packed
    _LOG.info("sequences run one by one: packed, this model's values are off by %.1e", gap)
    return alone


def follows_the_longest(forward: Forward) -> bool:
    """Whether a sequence's values depend on the longest one in its pass.

    Such rotary embeddings take one set of frequencies for the whole pass, by its largest position.
    """
    rotary = [getattr(module, "rope_type", None) for module in forward.model.modules()]
    kinds = [kind for each in rotary for kind in (each.values() if isinstance(each, dict) else [each]) if kind]
    return any(kind == "longrope" or "dynamic" in kind for kind in kinds)


def _attends_in_chunks(forward: Forward) -> bool:
    """Whether attention has bounds that are told to the model's own masks alone."""
    return "chunked_attention" in (getattr(forward.blocks.text_config, "layer_types", None) or ())


def _gap(packed: PackedPasses, alone: LonePasses) -> float:
    """The worst relative error of two sequences that share passes, prompt and one further token."""

    def ignore(_layer: int, _stream: torch.Tensor, _pieces: Sequence[Piece], _bounds: Sequence[int]) -> None:
        return None

    generator = torch.Generator().manual_seed(0)
    top = min(256, int(packed.forward.model.get_input_embeddings().weight.shape[0]))  # type: ignore[operator]
    sequences = [torch.randint(0, top, (n,), generator=generator).tolist() for n in _PROBE_TOKENS]
    whole = [alone.run([Piece(ids)], ignore, ()) for ids in sequences]
    states = [States(len(ids)) for ids in sequences]
    before = [Piece(ids[:-1], 0, held) for ids, held in zip(sequences, states, strict=True)]
    last = [Piece(ids[-1:], len(ids) - 1, held) for ids, held in zip(sequences, states, strict=True)]
    got = torch.cat([packed.run(before, ignore, ()), packed.run(last, ignore, ())]).double()
    wanted = torch.cat([*(rows[:-1] for rows in whole), *(rows[-1:] for rows in whole)]).double()
    gaps = (got - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-30)
    return float(gaps.max()) if bool(torch.isfinite(gaps).all()) else float("inf")
