"""What the engines' suite is run on: an engine, and what to hold it to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from streamtap.activations import Activations, join
from streamtap.engines.base import Engine
from streamtap.spec import CaptureSpec, PromptLike
from streamtap.testing.engine_suite_holding import hold, hold_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Ids = tuple[int, ...]
Floats = NDArray[np.float32]

#: Ragged, one of a single token, two that begin alike; every id is in a vocabulary of 97, and none is special there.
PROMPTS: tuple[Ids, ...] = (
    (31, 45, 28, 77, 52, 60),
    (64,),
    (31, 45, 28, 90, 33, 41, 86, 57, 72, 39, 24),
    (70, 26, 88),
)
#: Six tokens that five new ones are written to.
WRITES: Ids = (36, 81, 47, 59, 68, 30)


class Reference(Protocol):
    """The model that an engine runs, as it runs by itself in float32: one prompt, unpadded, nothing cached."""

    def rows(self, token_ids: Sequence[int]) -> Floats:
        """Every block's output before the final norm, float32 [layers, tokens, hidden]."""
        ...

    def logits(self, token_ids: Sequence[int]) -> Floats:
        """The model's own logits, float32 [tokens, vocabulary]."""
        ...

    def finish(self, rows: NDArray[Any]) -> Floats:
        """Logits [rows, vocabulary] that the last block's ``rows`` [rows, hidden] become: final norm and head."""
        ...


class PlainReference:
    """A ``transformers`` model as the reference; ``testing.reference`` runs it. Give it in float32.

    Args:
        model: The same weights as the engine's.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._rows: dict[Ids, Floats] = {}
        self._logits: dict[Ids, Floats] = {}

    def rows(self, token_ids: Sequence[int]) -> Floats:
        """See ``Reference.rows``; each prompt is run once."""
        from streamtap.testing.reference import plain_rows

        key = tuple(token_ids)
        if key not in self._rows:
            rows = plain_rows(self._model, key)
            self._rows[key] = np.stack([rows[layer].float().numpy() for layer in sorted(rows)])
        return self._rows[key]

    def logits(self, token_ids: Sequence[int]) -> Floats:
        """See ``Reference.logits``; each prompt is run once."""
        from streamtap.testing.reference import plain_logits

        key = tuple(token_ids)
        if key not in self._logits:
            self._logits[key] = plain_logits(self._model, key).float().numpy()
        return self._logits[key]

    def finish(self, rows: NDArray[Any]) -> Floats:
        """See ``Reference.finish``."""
        import torch

        from streamtap.testing.reference import finish

        wide = torch.from_numpy(rows.astype(np.float32)).to(self._model.dtype)
        logits: Floats = finish(self._model, wide).float().numpy()
        return logits


@dataclass(frozen=True, eq=False)
class EngineSubject:
    """An engine under test, with what it is held to.

    Args:
        engine: The engine, open.
        reference: The same model by itself; ``PlainReference(model)`` makes one.
        tolerance: The largest ‖a − b‖ / ‖b‖ of any row against the reference.
        same: The same between two runs of one prompt on this engine; None takes ``tolerance``.
        score_tolerance: How far a token's negative log-likelihood may be from the reference's, in nats.
        prompts: At least three token-id sequences of different lengths up to a dozen; the first has six tokens or more,
            the third three or more.
        text: A short text, or None where the engine has no tokenizer for text.
        scores: Whether it gives perplexity and token_nll; else it must refuse them with ``Unsupported``.
        logits: Whether it gives logits, whole and top k; else it must refuse them with ``Unsupported``.
        completes: Whether it is a ``Completes``; else it must not have ``submit``.
        steers: Whether completions take steering vectors; else it must refuse them with ``SteeringUnsupported``.
        another: Opens one more engine of this kind on the same model, which the suite closes. None, where one more
            costs too much: the suite's last test closes ``engine`` itself, so the class has no tests of its own.
        writes: Six token ids that greedy decoding goes on from for five tokens without an end token.
        prefix_tokens: Tokens of the prompt that is run twice: more than a block of the engine's prefix cache.
        many: Prompts of two tokens in the run that is abandoned: more than the engine gives at once, if it can be.
        timeout_seconds: How long one completion may take.
    """

    engine: Engine
    reference: Reference
    tolerance: float = 1e-4
    same: float | None = None
    score_tolerance: float = 1e-3
    prompts: tuple[Ids, ...] = PROMPTS
    text: str | None = "a cat sat."
    scores: bool = True
    logits: bool = True
    completes: bool = False
    steers: bool = False
    another: Callable[[], Engine] | None = None
    writes: Ids = WRITES
    prefix_tokens: int = 48
    many: int = 70
    timeout_seconds: float = 120.0
    _kept: dict[str, Activations] = field(default_factory=dict, init=False, repr=False)

    @property
    def n_layers(self) -> int:
        """Blocks of the reference."""
        return len(self.reference.rows(self.prompts[0]))

    @property
    def hidden(self) -> int:
        """Width of the reference's rows."""
        return int(self.reference.rows(self.prompts[0]).shape[-1])

    @property
    def between_runs(self) -> float:
        """The largest relative distance of a row from itself in another run."""
        return self.tolerance if self.same is None else self.same

    @property
    def ends(self) -> tuple[int, int]:
        """The first and the last block."""
        return 0, self.n_layers - 1

    def capture(self, prompts: Sequence[PromptLike], **spec: Any) -> Activations:
        """All that an ordered capture gives, as one; its prompts are held to be in the caller's order.

        Raises:
            AssertionError: they are not, or nothing came.
        """
        parts = list(self.engine.capture(prompts, CaptureSpec(**spec)))
        hold(bool(parts), "the capture gave nothing at all")
        whole = join(parts)
        hold(
            whole.index.tolist() == list(range(len(prompts))),
            f"an ordered capture of {len(prompts)} prompts says that its rows are those of {whole.index.tolist()}",
        )
        return whole

    def raw(self) -> Activations:
        """Every row of ``prompts`` at every layer; captured once."""
        if "raw" not in self._kept:
            self._kept["raw"] = self.capture(self.prompts)
        return self._kept["raw"]

    def hold_reference(self, acts: Activations, prompts: Sequence[Ids], what: str) -> None:
        """Hold the rows of ``acts``, of every position and not pooled, to the reference's, and their tokens to these.

        Raises:
            AssertionError: a row lacks, is there twice, is another prompt's, or too far away.
        """
        hold(len(acts) == len(prompts), f"{what}: {len(acts)} prompts came of {len(prompts)}")
        for place, prompt in enumerate(prompts):
            mine = slice(int(acts.offsets[place]), int(acts.offsets[place + 1]))
            told = list(zip(acts.positions[mine].tolist(), acts.token_ids[mine].tolist(), strict=True))
            there = list(enumerate(prompt))
            hold(told == there, f"{what}: prompt {place} has rows at {told}, its positions and tokens are {there}")
            for layer, rows in acts.prompt(place).items():
                right = self.reference.rows(prompt)[layer]
                hold_rows(rows, right, self.tolerance, f"{what}: prompt {place} at layer {layer}")
