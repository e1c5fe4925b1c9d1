"""What engines share that give the rows of one sequence at a time: the way there and back. It needs no torch.

::

    prompts ─► windows: token ids, positions, equal sequences once ─► make: each sequence's rows, in any order
      ─► checked ─► in the dtype asked for ─► Activations, a few sequences at a time
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from streamtap.activations import Activations, Provenance, in_asked_order
from streamtap.capture.runs import HostRows, TokenRun
from streamtap.codec import is_finite
from streamtap.engines.tokenizing import PromptTokenizer
from streamtap.engines.windows import HeldBytes, Window, windows_of
from streamtap.errors import CaptureMissed, InvalidInput
from streamtap.layers import resolve_layers
from streamtap.pooling import ONE_TOKEN, pool
from streamtap.spec import CaptureSpec, PromptLike, as_prompts

#: What is handed out together: enough for one durable write, and no more than waits in memory.
_PART_SEQUENCES, _PART_BYTES = 64, 64 << 20


@dataclass(frozen=True)
class Wanted:
    """What an engine is to give of each sequence; ``layers`` are ascending, and none where only the head is asked."""

    layers: tuple[int, ...]
    pooling: str
    nll: bool = False
    logits: Literal["last", "all"] | None = None
    top_k: int | None = None


@dataclass(frozen=True, eq=False)
class SequenceRows:
    """What came of one sequence.

    ``rows`` is [layers, rows, hidden]: one for each chosen position, or one where they are pooled. ``nll`` is float32
    [tokens - 1] in nats, ``logits`` float32 [1 or tokens, k or vocabulary] and ``logit_ids`` int32 alike.
    """

    rows: NDArray[Any] | None = None
    nll: NDArray[np.float32] | None = None
    logits: NDArray[np.float32] | None = None
    logit_ids: NDArray[np.int32] | None = None


#: One sequence's place among those that run, and what came of it.
Made = tuple[int, SequenceRows]
#: Runs sequences and gives each once, in any order. A generator is closed where its caller goes or an error comes.
Make = Callable[[Sequence[TokenRun], Wanted], Iterable[Made]]


@dataclass(frozen=True)
class BySequence:
    """The whole of ``Engine.capture`` but the running.

    Rows come from ``make`` in the dtype that ``provenance`` says, or in float32, which is then rounded to it.
    """

    provenance: Provenance
    tokenizer: PromptTokenizer
    make: Make

    def capture(self, prompts: Iterable[PromptLike], spec: CaptureSpec, *, ordered: bool) -> Iterator[Activations]:
        """See ``Engine.capture``. Where ``make`` fails, what it gave before comes first, unless it is ``ordered``.

        Raises:
            InvalidInput: a prompt, layer or position that cannot be, or nothing was asked for.
            CaptureMissed: an engine's rows are not whole, or not finite.
        """
        wanted = self._wanted(spec)
        if isinstance(prompts, Sequence | str):
            prompts = as_prompts(prompts)
        return self._captured(prompts, spec, wanted, ordered)

    def _wanted(self, spec: CaptureSpec) -> Wanted:
        layers = resolve_layers(spec.layers, self.provenance.n_layers)
        if not layers and not spec.needs_head:
            raise InvalidInput("nothing was asked for: layers is empty and neither perplexity nor logits are wanted.")
        hidden = self.provenance.hidden
        if spec.projection is not None and spec.projection.directions.shape[1] != hidden:
            raise InvalidInput(
                f"directions are {spec.projection.directions.shape[1]} wide; rows of {self.provenance.model} are "
                f"{hidden}."
            )
        return Wanted(layers, spec.pooling, spec.perplexity or spec.token_nll, spec.logits, spec.logit_top_k)

    def _captured(
        self, prompts: Iterable[PromptLike], spec: CaptureSpec, wanted: Wanted, ordered: bool
    ) -> Iterator[Activations]:
        held = self._held_bytes(wanted) if ordered else None
        for window in windows_of(prompts, self.tokenizer, spec, held, cut=not spec.needs_head):
            parts = self._window(window, spec, wanted)
            if ordered:
                yield in_asked_order(list(parts))
            else:
                yield from parts

    def _held_bytes(self, wanted: Wanted) -> HeldBytes:
        kept = 2 * wanted.top_k if wanted.top_k else self.tokenizer.vocabulary or 0
        return HeldBytes(len(wanted.layers) * self.provenance.hidden * 4, kept * 4 if wanted.logits else 0)

    def _window(self, window: Window, spec: CaptureSpec, wanted: Wanted) -> Iterator[Activations]:
        # Closed at once, not when they are collected: an engine may hold its device until its generator ends.
        with closing(self._checked(window, wanted)) as checked, closing(_parts(checked)) as parts:
            for part in parts:
                members = [place for place, _ in part]
                rows = self._joined([(window.runs[place], made) for place, made in part], wanted, spec)
                yield window.activations(members, rows, wanted.layers, spec, self.provenance)

    def _checked(self, window: Window, wanted: Wanted) -> Generator[Made, None, None]:
        """What was made, each sequence once and all of them."""
        missing = set(range(len(window.runs)))
        running = iter(self.make(window.runs, wanted))
        try:
            for place, made in running:
                if place not in missing:
                    raise self._missed("the engine gave a sequence twice, or one that was not asked for", wanted)
                missing.remove(place)
                check_made(window.runs[place], made, wanted, self.provenance)
                yield place, made
        finally:
            if isinstance(running, Generator):
                running.close()
        if missing:
            first = window.runs[min(missing)].name
            raise self._missed(f"the engine gave nothing for prompt {first}, one of {len(missing)} such", wanted)

    def _missed(self, what: str, wanted: Wanted) -> CaptureMissed:
        return CaptureMissed(f"{what}; run it again.", layer=_first_layer(wanted, self.provenance))

    def _joined(self, part: Sequence[tuple[TokenRun, SequenceRows]], wanted: Wanted, spec: CaptureSpec) -> HostRows:
        places = [_row_positions(run, wanted.pooling) for run, _ in part]
        made = [each for _, each in part]
        rows = None
        if wanted.layers:
            whole = np.concatenate([each.rows for each in made if each.rows is not None], axis=1)
            rows = _narrowed(whole.astype(_dtype(self.provenance.dtype), copy=False), spec)
        return HostRows(
            rows,
            np.array([len(each) for each in places], np.int64),
            np.concatenate(places).astype(np.int32, copy=False),
            [each.nll for each in made if each.nll is not None] if wanted.nll else None,
            [each.logits for each in made if each.logits is not None] if wanted.logits else None,
            [each.logit_ids for each in made if each.logit_ids is not None] if wanted.logits and wanted.top_k else None,
        )


def chosen_rows(values: NDArray[Any], run: TokenRun, pooling: str) -> NDArray[Any]:
    """Of rows at every token [layers, tokens, hidden] those that ``run`` has, pooled: [layers, rows, hidden]."""
    picked = _picked(run, pooling)
    rows = values if len(picked) == values.shape[1] else values[:, picked]
    return pooled_rows(rows, pooling)


def pooled_rows(rows: NDArray[Any], pooling: str) -> NDArray[Any]:
    """Rows of chosen positions [layers, rows, hidden] as one each, where ``pooling`` says so."""
    if pooling == "none" or (pooling in ONE_TOKEN and rows.shape[1] == 1):
        return rows
    offsets = np.array([0, rows.shape[1]], np.int64)
    return np.stack([pool(layer, offsets, pooling) for layer in rows])


def check_made(run: TokenRun, made: SequenceRows, wanted: Wanted, provenance: Provenance) -> None:
    """Hold what an engine gave of one sequence against what was asked.

    Raises:
        CaptureMissed: a layer, a row or a head value lacks, is of another shape or dtype, is not finite, or a layer is
            dead.
    """
    if wanted.layers:
        count = len(run.chosen) if wanted.pooling == "none" else 1
        shape = (len(wanted.layers), count, provenance.hidden)
        for layer, rows in zip(wanted.layers, _shaped(run, "rows", made.rows, shape, wanted.layers[0]), strict=True):
            _check_layer(run, wanted.pooling, layer, rows, provenance.dtype)
    _check_head(run, made, wanted, _first_layer(wanted, provenance))


def _check_head(run: TokenRun, made: SequenceRows, wanted: Wanted, layer: int) -> None:
    tokens = len(run.token_ids)
    held: list[tuple[str, NDArray[np.float32]]] = []
    if wanted.nll:
        held.append(("log-likelihoods", _shaped(run, "log-likelihoods", made.nll, (tokens - 1,), layer)))
    if wanted.logits is not None:
        shape = (tokens if wanted.logits == "all" else 1, _logits_kept(made.logits, wanted.top_k))
        held.append(("logits", _shaped(run, "logits", made.logits, shape, layer)))
        if wanted.top_k is not None:
            _shaped(run, "ids of logits", made.logit_ids, shape, layer)
    for what, values in held:
        if not np.isfinite(values).all():
            raise CaptureMissed(f"{what} of prompt {run.name} hold a value that is not finite.", layer=layer)


def _logits_kept(logits: NDArray[np.float32] | None, top_k: int | None) -> int:
    """How many logits a row has: all that there are, or the k largest of them, which may be as many."""
    there = 0 if logits is None or not logits.ndim else logits.shape[-1]
    return there if top_k is None else min(top_k, max(1, there))


def _shaped(run: TokenRun, what: str, values: NDArray[Any] | None, shape: tuple[int, ...], layer: int) -> NDArray[Any]:
    if values is not None and values.shape == shape:
        return values
    came = "none" if values is None else str(list(values.shape))
    raise CaptureMissed(
        f"the engine gave {what} of shape {came} for prompt {run.name}; expected {list(shape)}.", layer=layer
    )


def _check_layer(run: TokenRun, pooling: str, layer: int, rows: NDArray[Any], dtype: str) -> None:
    if rows.dtype.name not in (dtype, "float32"):
        raise CaptureMissed(
            f"block {layer} came in {rows.dtype.name} for prompt {run.name}; expected {dtype} or float32.", layer=layer
        )
    if not is_finite(rows):
        raise CaptureMissed(f"block {layer} put out a value that is not finite for prompt {run.name}.", layer=layer)
    # A token that stands alone may have an embedding of zero, as padding's often is, and then has no row but zeros.
    alone = len(run.chosen) == 1 or pooling == "first_token"
    if not rows.any() and not (alone and run.chosen[0] == 0):
        raise CaptureMissed(
            f"block {layer} put out only zeros for prompt {run.name}, which no working device gives.", layer=layer
        )


def _first_layer(wanted: Wanted, provenance: Provenance) -> int:
    """The first block that a fault concerns; the head stands behind the last one."""
    return wanted.layers[0] if wanted.layers else provenance.n_layers - 1


def _parts(made: Iterable[Made]) -> Generator[list[Made], None, None]:
    """A few sequences together; where making them fails, those that were made before come first."""
    part: list[Made] = []
    size = 0
    try:
        for place, rows in made:
            part.append((place, rows))
            size += sum(each.nbytes for each in (rows.rows, rows.logits) if each is not None)
            if len(part) == _PART_SEQUENCES or size >= _PART_BYTES:
                full, part, size = part, [], 0
                yield full
    except Exception:
        if part:
            yield part
        raise
    if part:
        yield part


def _row_positions(run: TokenRun, pooling: str) -> NDArray[np.int32]:
    if pooling == "none" or pooling in ONE_TOKEN:
        return _picked(run, pooling)
    return np.full(1, -1, np.int32)


def _picked(run: TokenRun, pooling: str) -> NDArray[np.int32]:
    """The chosen positions that pooling needs: one of them for ``last_token`` and ``first_token``."""
    if pooling not in ONE_TOKEN:
        return run.chosen
    return run.chosen[-1:] if pooling == "last_token" else run.chosen[:1]


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def _narrowed(rows: NDArray[Any], spec: CaptureSpec) -> NDArray[Any]:
    if spec.projection is not None:
        return rows.astype(np.float32) @ spec.projection.directions.T
    if spec.dtype is None:
        return rows
    return rows.astype(_dtype(spec.dtype), copy=False)
