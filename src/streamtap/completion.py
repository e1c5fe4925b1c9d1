"""What a completion asks of an engine, and what comes back: text, token by token, and rows.

::

    CompletionRequest ─► engine.submit(request, emit) ─► Delta* ─► Finished | Failed
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from streamtap.activations import Activations
from streamtap.errors import StreamtapError

CapturedPositions = Literal["all", "last", "prompt", "generated"] | tuple[int, ...]
WireDtype = Literal["bfloat16", "float32"]
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn; the defaults draw from the model's own distribution.

    ``temperature`` 0 is greedy. ``top_k`` None, ``top_p`` 1 and ``min_p`` 0 are off. ``seed`` makes
    the draws of this request repeatable in one engine; None draws anew each time.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None


@dataclass(frozen=True, eq=False)
class SteeringVector:
    """A direction that is added to the residual stream at some blocks' outputs.

    ``vectors`` is float32 [layers, hidden], for every position or those inside ``spans``
    [[start, end), …]; or [layers, P, hidden] with ``positions`` of length P, one vector for each. At a block's
    output h it makes ``h + scale * v``, or with ``norm_match`` ``h + scale * v * |h| / (|v| + 1e-6)``.
    Positions are absolute, from 0, and count prompt and generated tokens alike.
    """

    layers: tuple[int, ...]
    vectors: NDArray[np.float32]
    scale: float = 1.0
    norm_match: bool = False
    positions: tuple[int, ...] | None = None
    spans: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True)
class CaptureAsk:
    """Which rows of the residual stream come back: ``layers`` ascending, at ``positions``, in ``dtype``.

    An int in ``positions`` is absolute, from 0; one that the generation did not reach has no row.
    """

    layers: tuple[int, ...]
    positions: CapturedPositions = "all"
    dtype: WireDtype = "bfloat16"


@dataclass(frozen=True)
class CompletionRequest:
    """One request: every prompt is completed ``n`` times, choices ordered by prompt, then by sample.

    A prompt is text or token ids, which are used as they are. ``logprobs`` is how many of the likeliest tokens are
    listed beside each token; ``prompt_logprobs`` the same for the prompts, -1 the whole vocabulary. ``stream``
    asks for deltas as the text is made. ``max_tokens`` 0 runs the prompts and draws nothing.
    """

    prompts: tuple[str | tuple[int, ...], ...]
    max_tokens: int
    n: int = 1
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    add_special_tokens: bool = True
    capture: CaptureAsk | None = None
    steering: tuple[SteeringVector, ...] = ()
    stream: bool = False


@dataclass(frozen=True)
class TokenLog:
    """One token and what else might have stood there.

    ``logprob`` is in nats, None where nothing stands before the token; ``rank`` counts from 1; ``top`` are the
    likeliest tokens (id, text, logprob), best first. ``offset`` is where the token's text begins, in characters.
    """

    token_id: int
    text: str
    offset: int
    logprob: float | None
    rank: int | None = None
    top: tuple[tuple[int, str, float], ...] = ()


@dataclass(frozen=True, eq=False)
class Rows:
    """Captured rows of one sequence: ``values`` [layers, rows, hidden] in bfloat16 or float32.

    ``positions`` and ``token_ids`` are int32 [rows].
    """

    layers: tuple[int, ...]
    values: NDArray[Any]
    positions: NDArray[np.int32]
    token_ids: NDArray[np.int32]


class PromptLogs(Protocol):
    """Log-probabilities of a prompt's tokens, made one position at a time since a whole vocabulary may be large."""

    def __len__(self) -> int:
        """Prompt tokens."""
        ...

    def at(self, position: int) -> TokenLog:
        """The token at ``position`` and its likeliest rivals; position 0 has no logprob."""
        ...


@dataclass(frozen=True, eq=False)
class Choice:
    """One finished sequence.

    ``text`` leaves the prompt out unless ``echo`` was asked for. ``stop_reason`` is the matched stop string, the id of
    the token that ended it, or None.
    """

    index: int
    text: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logs: tuple[TokenLog, ...] | None = None
    prompt_logs: PromptLogs | None = None
    rows: Rows | None = None


@dataclass(frozen=True)
class Usage:
    """Tokens that ran: ``prompt_tokens`` counts every prompt once, with the BOS that was added."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        """Both together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Delta:
    """Text that is certain now, of one choice; the last of a choice has its ``finish_reason``."""

    index: int
    text: str
    logs: tuple[TokenLog, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True)
class Finished:
    """The request is done; ``choices`` are in order."""

    choices: tuple[Choice, ...]
    usage: Usage


@dataclass(frozen=True)
class Failed:
    """The request ended without an answer."""

    error: StreamtapError


Event = Delta | Finished | Failed
Emit = Callable[[Event], None]
Cancel = Callable[[], None]


@dataclass(frozen=True, eq=False)
class Completion:
    """An answer as a caller holds it, from an engine in this process or from a server.

    ``activations`` has one entry a choice, rows ragged as ever; None without a capture. ``model`` is the checkpoint.
    """

    choices: tuple[Choice, ...]
    usage: Usage
    model: str = ""
    id: str = ""
    activations: Activations | None = None

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text
