"""What one trace runs and gives: token sequences to tensors, and the bytes that come back to rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray

from streamtap.capture.batches import Group, cut_batches
from streamtap.capture.runs import TokenRun
from streamtap.engines.by_sequence import SequenceRows, Wanted
from streamtap.errors import CaptureMissed
from streamtap.pooling import ONE_TOKEN

#: One array a sequence, or None where it was not asked for.
Parts = Sequence[NDArray[Any] | None]
#: What one trace gives at most, unless a single sequence gives more: it is held whole, here and where it is made.
MOST_BYTES = 256 << 20
#: float32 logits held at once, in values; and what a vocabulary is taken for where it is not known.
_SLICE_VALUES, _LARGE_VOCABULARY = 16 << 20, 1 << 18


@dataclass(frozen=True)
class Limits:
    """How much one trace may hold: ``prompts`` of them, ``tokens`` with padding, ``result_bytes`` of what it gives."""

    prompts: int | None
    tokens: int
    result_bytes: int = MOST_BYTES


@dataclass(frozen=True)
class Sizes:
    """What decides how many bytes a row takes; ``vocabulary`` is None where it is not known."""

    hidden: int
    dtype: str
    vocabulary: int | None

    @property
    def array_dtype(self) -> np.dtype[Any]:
        """``dtype`` as numpy has it."""
        return np.dtype(ml_dtypes.bfloat16) if self.dtype == "bfloat16" else np.dtype(self.dtype)


@dataclass(frozen=True, eq=False)
class Trace:
    """One pass over a few sequences, as plain tensors: whatever runs it knows nothing of Streamtap.

    ``token_ids`` is int64 [prompts, width], padded on the right. ``batch`` and ``positions``, int64 [rows], are where
    the rows stand, ``counts`` how many each sequence has; ``reduce`` is ``"mean"`` or ``"max"`` over those of a
    sequence, or None. ``predicting`` are the places in [prompts * width] that predict ``targets``, and ``kept`` those
    whose logits come, all or the largest ``top_k``; ``slice_rows`` of them are looked at together.
    """

    token_ids: torch.Tensor
    batch: torch.Tensor
    positions: torch.Tensor
    counts: list[int]
    reduce: str | None
    predicting: torch.Tensor
    targets: torch.Tensor
    kept: torch.Tensor
    top_k: int | None
    slice_rows: int

    @property
    def needs_head(self) -> bool:
        """Whether logits are looked at."""
        return bool(len(self.predicting) or len(self.kept))

    def arguments(self) -> dict[str, Any]:
        """What ``in_trace.run_trace`` is called with."""
        return {**vars(self), "needs_head": self.needs_head}


def plan_trace(runs: Sequence[TokenRun], wanted: Wanted, sizes: Sizes) -> Trace:
    """The pass over ``runs`` that gives what is ``wanted``."""
    lengths = [len(run.token_ids) for run in runs]
    width = max(lengths)
    # Any id will do as padding: it stands to the right, where no real position can see it.
    ids = np.zeros((len(runs), width), np.int64)
    for b, run in enumerate(runs):
        ids[b, : lengths[b]] = run.token_ids
    chosen = [_picked(run, wanted.pooling) for run in runs]
    before = [np.arange(length - 1 if wanted.nll else 0) for length in lengths]
    return Trace(
        token_ids=torch.from_numpy(ids),
        batch=_whole([np.full(len(each), b) for b, each in enumerate(chosen)]),
        positions=_whole(chosen),
        counts=[len(each) for each in chosen],
        reduce=wanted.pooling if wanted.pooling in ("mean", "max") else None,
        predicting=_whole([b * width + each for b, each in enumerate(before)]),
        targets=_whole([run.token_ids[1 : len(each) + 1] for run, each in zip(runs, before, strict=True)]),
        kept=_whole([b * width + each for b, each in enumerate(_kept(length, wanted) for length in lengths)]),
        top_k=wanted.top_k,
        slice_rows=max(1, _SLICE_VALUES // (sizes.vocabulary or _LARGE_VOCABULARY)),
    )


def read_trace(packed: NDArray[np.uint8], runs: Sequence[TokenRun], wanted: Wanted, sizes: Sizes) -> list[SequenceRows]:
    """What a trace over ``runs`` gave, uint8 [bytes]: rows layer after layer, then costs, logits and their ids.

    Raises:
        CaptureMissed: there are more or fewer bytes than that.
    """
    left = _Bytes(packed)
    lengths = [len(run.token_ids) for run in runs]
    rows = _rows(left, runs, wanted, sizes)
    nll = _costs(left, lengths, wanted)
    logits, logit_ids = _logits(left, lengths, wanted)
    left.end()
    return [SequenceRows(*each) for each in zip(rows, nll, logits, logit_ids, strict=True)]


def cut_traces(
    runs: Sequence[TokenRun], places: Sequence[int], wanted: Wanted, sizes: Sizes, limits: Limits
) -> Iterator[tuple[int, ...]]:
    """The ``places`` of ``runs`` that run together, longest first, within ``limits``."""
    lengths = [len(run.token_ids) for run in runs]
    for members in cut_batches(Group(0, tuple(places)), lengths, limits.prompts, limits.tokens):
        part: list[int] = []
        held = 0
        for place in members:
            cost = result_bytes(runs[place], wanted, sizes)
            if part and held + cost > limits.result_bytes:
                yield tuple(part)
                part, held = [], 0
            part.append(place)
            held += cost
        yield tuple(part)


def result_bytes(run: TokenRun, wanted: Wanted, sizes: Sizes) -> int:
    """Bytes that one sequence's rows, costs and logits take."""
    rows = len(run.chosen) if wanted.pooling == "none" else 1
    values = len(wanted.layers) * rows * sizes.hidden * sizes.array_dtype.itemsize
    costs = 4 * (len(run.token_ids) - 1) if wanted.nll else 0
    each = 8 * wanted.top_k if wanted.top_k else 4 * (sizes.vocabulary or 0)
    return values + costs + each * len(_kept(len(run.token_ids), wanted))


class _Bytes:
    """What is left to read."""

    def __init__(self, packed: NDArray[np.uint8]) -> None:
        self._packed, self._at = packed, 0

    @property
    def left(self) -> int:
        return len(self._packed) - self._at

    def take(self, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
        stop = self._at + count * dtype.itemsize
        if stop > len(self._packed):
            raise _not_whole(f"{len(self._packed)} bytes, {stop} at the least")
        taken = self._packed[self._at : stop].view(dtype)
        self._at = stop
        return taken if taken.flags.aligned else taken.copy()

    def end(self) -> None:
        if self.left:
            raise _not_whole(f"{self.left} bytes more than")


def _not_whole(what: str) -> CaptureMissed:
    return CaptureMissed(f"a trace gave {what} were expected; nothing of it is kept.", layer=0)


def _rows(packed: _Bytes, runs: Sequence[TokenRun], wanted: Wanted, sizes: Sizes) -> Parts:
    if not wanted.layers:
        return [None] * len(runs)
    counts = [len(run.chosen) if wanted.pooling == "none" else 1 for run in runs]
    values = packed.take(sizes.array_dtype, len(wanted.layers) * sum(counts) * sizes.hidden)
    return np.split(values.reshape(len(wanted.layers), sum(counts), sizes.hidden), np.cumsum(counts)[:-1], axis=1)


def _costs(packed: _Bytes, lengths: Sequence[int], wanted: Wanted) -> Parts:
    counts = [length - 1 for length in lengths]
    return _split(packed.take(np.dtype(np.float32), sum(counts)), counts) if wanted.nll else [None] * len(counts)


def _split(values: NDArray[Any], counts: Sequence[int]) -> Parts:
    return np.split(values, np.cumsum(counts)[:-1])


def _logits(packed: _Bytes, lengths: Sequence[int], wanted: Wanted) -> tuple[Parts, Parts]:
    counts = [len(_kept(length, wanted)) for length in lengths]
    none: Parts = [None] * len(lengths)
    if wanted.logits is None:
        return none, none
    parts = 2 if wanted.top_k else 1
    most, over = divmod(packed.left, 4 * parts * sum(counts))
    if over or not most:
        raise _not_whole(f"{packed.left} bytes of logits for {sum(counts)} positions; others")
    values = packed.take(np.dtype(np.float32), most * sum(counts)).reshape(-1, most)
    ids = packed.take(np.dtype(np.int32), most * sum(counts)).reshape(-1, most) if wanted.top_k else None
    return _split(values, counts), none if ids is None else _split(ids, counts)


def _picked(run: TokenRun, pooling: str) -> NDArray[np.int32]:
    if pooling not in ONE_TOKEN:
        return run.chosen
    return run.chosen[-1:] if pooling == "last_token" else run.chosen[:1]


def _kept(length: int, wanted: Wanted) -> NDArray[np.int64]:
    """Positions of a sequence of ``length`` tokens whose logits come."""
    first = {None: length, "last": length - 1, "all": 0}[wanted.logits]
    return np.arange(first, length, dtype=np.int64)


def _whole(parts: Sequence[NDArray[Any]]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int64))
