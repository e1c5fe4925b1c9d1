"""What vllm-lens answers wrongly without a word, and is therefore never asked; and what it can be asked in its place.

===================================================  ======================================================
vllm-lens                                            here
===================================================  ======================================================
captures and steers the first prompt's first sample  refused
draws a token whatever ``max_tokens`` says           refused
knows no ``output_positions`` and ``output_dtype``   the gateway chooses, of rows of every position
knows no ``position_spans``                          a vector a position, with ``max_tokens`` 1
takes a pass for the beginning of its text           single positions with ``max_tokens`` 1 only, of a prompt that
                                                     runs in one piece
takes every norm before the first vector             ``norm_match`` for the first vector of a layer only
writes on where a vector is out of range             refused, as far as that shows without the rows
===================================================  ======================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from streamtap.completion import CompletionRequest, SteeringVector
from streamtap.errors import SteeringNotFinite, SteeringUnsupported, Unsupported

#: What one vector may grow to, in bytes of float32, where each position of its spans gets it by itself.
_MOST_BYTES = 16 * 1024 * 1024


def check_vllm_can(request: CompletionRequest, *, runs_whole: bool) -> None:
    """Refuse what a ``vllm serve`` with vllm-lens would drop, or do another way.

    ``runs_whole`` is whether each prompt surely goes through the model in one piece.

    Raises:
        Unsupported: a capture, or no new token, in a form that it does not have.
        SteeringUnsupported: vectors that it would apply elsewhere, or at another strength.
    """
    if request.max_tokens == 0 and not (request.echo and request.capture is None and request.prompt_logprobs is None):
        raise Unsupported("this model's engine (vLLM) draws at least one token; send max_tokens 1.")
    if request.capture is not None or request.steering:
        _check_one_sequence(request)
    _check_positions(request, runs_whole)
    _check_norms(request.steering)


def check_vectors(request: CompletionRequest, prompt_tokens: Sequence[int], dtype: str | None = None) -> None:
    """Refuse vectors that are too large for the engine, as far as that shows without its rows.

    ``dtype`` is what the engine computes in, as far as that is known.

    Raises:
        SteeringUnsupported: with one for each position of its spans, a vector is more than one request can carry.
        SteeringNotFinite: a vector is out of the range of ``dtype`` by itself.
    """
    for vector in request.steering:
        _check_range(vector, "float16" if dtype == "float16" else "float32")
        count = len(_spanned(vector, max(prompt_tokens)))
        if vector.vectors.nbytes * count > _MOST_BYTES:
            raise SteeringUnsupported(
                f"this model's engine (vLLM) has no position_spans, and this vector for {count} positions by itself "
                "is too large; send fewer layers or shorter spans."
            )


def for_vllm(request: CompletionRequest, prompt_tokens: Sequence[int], dtype: str | None = None) -> CompletionRequest:
    """``request`` with a vector for each position where it has spans, which vllm-lens does not know.

    Raises:
        SteeringUnsupported: as ``check_vectors``; ``SteeringNotFinite`` alike.
    """
    check_vectors(request, prompt_tokens, dtype)
    if all(vector.spans is None for vector in request.steering):
        return request
    fed = max(prompt_tokens)
    return replace(request, steering=tuple(_by_position(vector, fed) for vector in request.steering))


def _spanned(vector: SteeringVector, fed: int) -> tuple[int, ...]:
    """The positions that its spans hold and the prompt has."""
    return tuple(place for start, end in vector.spans or () for place in range(start, min(end, fed)))


def _by_position(vector: SteeringVector, fed: int) -> SteeringVector:
    """The vector once for each position of its spans."""
    if vector.spans is None:
        return vector
    positions = _spanned(vector, fed)
    repeated = np.repeat(vector.vectors[:, None], len(positions), axis=1)
    return replace(vector, vectors=repeated, positions=positions, spans=None)


def _check_range(vector: SteeringVector, dtype: str) -> None:
    """What is added is in the model's dtype; of what the stream then is, nothing shows where no rows are asked for."""
    most = float(np.finfo(dtype).max)
    if not vector.norm_match and float(np.abs(vector.vectors).max(initial=0)) * abs(vector.scale) > most:
        raise SteeringNotFinite(
            f"a steering vector times its scale is over {most:g}, which no {dtype} holds; lower its scale."
        )


def _check_one_sequence(request: CompletionRequest) -> None:
    """It captures and steers the first prompt's first sample only."""
    if len(request.prompts) * request.n > 1:
        kind = Unsupported if request.capture is not None else SteeringUnsupported
        raise kind("this model's engine (vLLM) captures and steers one prompt with n 1; send one request for each.")


def _check_positions(request: CompletionRequest, runs_whole: bool) -> None:
    """It takes the first token of every pass for position 0: those of a decode step, and of a prompt's later pieces."""
    if all(vector.spans is None and vector.vectors.ndim == 2 for vector in request.steering):
        return
    if request.max_tokens > 1:
        raise SteeringUnsupported("this model's engine (vLLM) steers single positions with max_tokens 1 only.")
    if not runs_whole:
        raise SteeringUnsupported(
            "this model's engine (vLLM) may run a prompt in pieces, and would then steer other positions than those "
            "asked for; send vectors for every position, or ask a model that is not served so."
        )


def _check_norms(vectors: Sequence[SteeringVector]) -> None:
    """It matches the norm that the stream had before any vector, which is right for the first of a layer."""
    steered: set[int] = set()
    for vector in vectors:
        if vector.norm_match and steered & set(vector.layers):
            raise SteeringUnsupported(
                "this model's engine (vLLM) takes norm_match for the first vector of a layer only; send that one first."
            )
        steered |= set(vector.layers)
