"""What came out of a capture: ragged rows per layer, and where they came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from streamtap.errors import InvalidInput, MissingExtra
from streamtap.ragged import offsets_of, ranges

if TYPE_CHECKING:
    import torch

Array = NDArray[Any]


@dataclass(frozen=True)
class Provenance:
    """Where rows came from: everything one needs to make them again.

    ``model`` is the name that was asked for; ``commit`` is the Hub commit or, for local
    files, ``"sha256:…"`` of their content.
    """

    model: str
    commit: str
    tokenizer: str
    dtype: str
    quantization: str | None = None
    attention: str | None = None
    engine: str = "transformers"
    engine_version: str = ""
    device: str = "cpu"
    n_layers: int = 0
    hidden: int = 0


@dataclass(frozen=True)
class Activations:
    """Rows of several prompts, ragged and never padded.

    ``acts[layer]`` is [rows, hidden]. Prompt i owns rows ``offsets[i]:offsets[i + 1]``;
    ``offsets`` is int64 [prompts + 1]. ``token_ids`` and ``positions`` are int32 [rows]:
    the token a row stands on and its place in the prompt, or -1 where a row is a mean or
    a maximum over several. ``index`` is int64 [prompts]: each prompt's place in the list
    that was asked for. Pooled data is the same with one row a prompt.

    ``perplexity`` is float64 [prompts, 3] (mean, min, max), ``token_nll`` one float32
    [tokens - 1] a prompt (negative log-likelihood in nats), ``logits`` float32
    [logit rows, k or vocabulary], ``logit_ids`` int32 of that shape when a top k was
    taken, and ``logit_offsets`` int64 [prompts + 1]; each is None unless it was asked for.
    """

    acts: dict[int, Array]
    offsets: NDArray[np.int64]
    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    provenance: Provenance
    pooling: str = "none"
    index: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    perplexity: NDArray[np.float64] | None = None
    token_nll: tuple[NDArray[np.float32], ...] | None = None
    logits: NDArray[np.float32] | None = None
    logit_ids: NDArray[np.int32] | None = None
    logit_offsets: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        """Number of prompts."""
        return len(self.offsets) - 1

    @property
    def layers(self) -> tuple[int, ...]:
        """Layer numbers held, ascending."""
        return tuple(sorted(self.acts))

    def prompt(self, i: int) -> dict[int, Array]:
        """Rows of prompt ``i``, from the end where it is negative: ``{layer: [rows, hidden]}``.

        Raises:
            IndexError: there is no such prompt.
        """
        place = range(len(self))[i]
        start, stop = int(self.offsets[place]), int(self.offsets[place + 1])
        return {layer: rows[start:stop] for layer, rows in self.acts.items()}

    def torch(self) -> dict[int, torch.Tensor]:
        """The rows as torch tensors, ``{layer: [rows, hidden]}``, in the stored dtype.

        Raises:
            MissingExtra: torch is not installed.
        """
        return {layer: to_torch(rows) for layer, rows in self.acts.items()}

    def select(self, places: Sequence[int] | NDArray[np.int64]) -> Activations:
        """The prompts at ``places``, in that order, with all that belongs to them.

        Negative places count from the end and a mask [prompts] picks, as in any array.

        Raises:
            IndexError: there is no such prompt.
        """
        asked = np.asarray(places) if len(places) else np.zeros(0, np.int64)
        picks = np.arange(len(self), dtype=np.int64)[asked]
        rows, offsets = _gather(self.offsets, picks)
        logit_rows, logit_offsets = (None, None)
        if self.logit_offsets is not None:
            logit_rows, logit_offsets = _gather(self.logit_offsets, picks)
        return replace(
            self,
            acts={layer: values[rows] for layer, values in self.acts.items()},
            offsets=offsets,
            token_ids=self.token_ids[rows],
            positions=self.positions[rows],
            index=self.index[picks] if len(self.index) else self.index,
            perplexity=None if self.perplexity is None else self.perplexity[picks],
            token_nll=None if self.token_nll is None else tuple(self.token_nll[i] for i in picks),
            logits=None if self.logits is None else self.logits[logit_rows],
            logit_ids=None if self.logit_ids is None else self.logit_ids[logit_rows],
            logit_offsets=logit_offsets,
        )


def join(parts: Sequence[Activations]) -> Activations:
    """Several captures of the same layers and pooling as one, prompts in the order given.

    Raises:
        InvalidInput: nothing to join, or parts of different models, layers or poolings, or of
            which only some have perplexity or logits.
    """
    if not parts:
        raise InvalidInput("join needs at least one Activations, got none.")
    first = parts[0]
    for part in parts[1:]:
        if part.layers != first.layers or part.pooling != first.pooling:
            raise InvalidInput(
                f"join needs parts of one kind: the first holds layers {list(first.layers)} with pooling "
                f"{first.pooling!r}, another holds {list(part.layers)} with {part.pooling!r}."
            )
    _check_same_kind(parts)
    return replace(
        first,
        acts={layer: np.concatenate([part.acts[layer] for part in parts]) for layer in first.layers},
        offsets=_chain([part.offsets for part in parts]),
        token_ids=np.concatenate([part.token_ids for part in parts]),
        positions=np.concatenate([part.positions for part in parts]),
        index=np.concatenate([part.index for part in parts]),
        perplexity=_joined([part.perplexity for part in parts]),
        token_nll=_joined_tuples([part.token_nll for part in parts]),
        logits=_joined([part.logits for part in parts]),
        logit_ids=_joined([part.logit_ids for part in parts]),
        logit_offsets=_chain_optional([part.logit_offsets for part in parts]),
    )


def in_asked_order(parts: Sequence[Activations]) -> Activations:
    """Captures that came batch by batch as one, prompts in the caller's order.

    Raises:
        InvalidInput: as ``join``, or parts that do not say whose their rows are.
    """
    whole = join(parts)
    if len(whole.index) != len(whole):
        raise InvalidInput(f"the index names {len(whole.index)} of {len(whole)} prompts, so their order is not known.")
    return whole.select(np.argsort(whole.index, kind="stable"))


def _check_same_kind(parts: Sequence[Activations]) -> None:
    models = {(part.provenance.model, part.provenance.commit, part.provenance.dtype) for part in parts}
    if len(models) > 1:
        raise InvalidInput(f"join needs rows of one model; got {' and '.join(map(str, sorted(models)))}.")
    for name in ("perplexity", "token_nll", "logits", "logit_ids"):
        held = sum(getattr(part, name) is not None for part in parts)
        if 0 < held < len(parts):
            raise InvalidInput(f"join needs parts of one kind: {held} of {len(parts)} hold {name}.")


def _gather(offsets: NDArray[np.int64], picks: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    counts = np.diff(offsets)[picks]
    return ranges(offsets[picks], counts), offsets_of(counts)


def _chain(offsets: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    return offsets_of(np.concatenate([np.diff(each) for each in offsets]))


def _chain_optional(offsets: Sequence[NDArray[np.int64] | None]) -> NDArray[np.int64] | None:
    present = [each for each in offsets if each is not None]
    return _chain(present) if len(present) == len(offsets) else None


def _joined(arrays: Sequence[Array | None]) -> Any:
    present = [each for each in arrays if each is not None]
    return np.concatenate(present) if len(present) == len(arrays) else None


def _joined_tuples(parts: Sequence[tuple[Any, ...] | None]) -> Any:
    present = [each for each in parts if each is not None]
    return tuple(item for part in present for item in part) if len(present) == len(parts) else None


def to_torch(rows: Array) -> torch.Tensor:
    """The same values as a torch tensor, in the same dtype; dense rows are not copied.

    Raises:
        MissingExtra: torch is not installed.
    """
    try:
        import torch
    except ImportError as error:
        raise MissingExtra("torch tensors need torch: pip install 'streamtap[local]'.") from error
    dense = np.ascontiguousarray(rows)
    if dense.dtype.name == "bfloat16":
        return torch.from_numpy(dense.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(dense)
