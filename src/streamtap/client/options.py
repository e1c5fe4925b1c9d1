"""What may be said of a completion beside its prompt, by the names of the HTTP contract."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from streamtap.completion import SteeringVector

Positions = Literal["all", "last", "prompt", "generated"] | Sequence[int]


class CompletionOptions(TypedDict, total=False):
    """Keyword arguments of ``complete`` and ``stream``; what is left out, or None, is the server's default.

    ``max_tokens`` 0 runs the prompt alone. ``output_residual_stream`` is True for every block or a list of blocks, and
    ``output_positions`` and ``output_dtype`` say which rows come back, in what. ``apply_steering_vectors`` takes what
    ``steering_vector`` gives. ``prompt_logprobs`` -1 is the whole vocabulary.
    """

    max_tokens: int | None
    n: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    logprobs: int | None
    prompt_logprobs: int | None
    echo: bool | None
    add_special_tokens: bool | None
    user: str | None
    output_residual_stream: bool | Sequence[int] | None
    output_positions: Positions | None
    output_dtype: Literal["bfloat16", "float32"] | None
    apply_steering_vectors: Sequence[Mapping[str, Any] | SteeringVector] | None
