"""What a request may say, whoever made it: a step runs many requests, and none may break it for the others."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from numbers import Integral, Real
from typing import Any

from streamtap.completion import CaptureAsk, CompletionRequest, Sampling
from streamtap.errors import InvalidInput

_WORDS = ("all", "last", "prompt", "generated")
_DTYPES = ("bfloat16", "float32")
_LEAST_FLOAT = 5e-324

#: Name, value, kind, least and most.
_Number = tuple[str, Any, Any, float, float]


def check_request(request: CompletionRequest, n_layers: int) -> None:
    """Refuse what means nothing on a model of ``n_layers`` blocks.

    Raises:
        InvalidInput: the first that was found, by its name.
    """
    if not request.prompts:
        raise InvalidInput("the request has no prompt; expected at least one.")
    for name, value, kind, least, most in _numbers(request):
        if not isinstance(value, kind) or isinstance(value, bool) or not least <= value <= most:
            said = "a whole number" if kind is Integral else "a number"
            raise InvalidInput(f"{name} must be {said} {_range(least, most)}; got {value!r}.")
    if request.capture is not None:
        _check_capture(request, request.capture, n_layers)


def _numbers(request: CompletionRequest) -> Iterator[_Number]:
    """Every number that is not off."""
    yield "n", request.n, Integral, 1, inf
    yield "max_tokens", request.max_tokens, Integral, 0, inf
    if request.logprobs is not None:
        yield "logprobs", request.logprobs, Integral, 0, inf
    if request.prompt_logprobs is not None:
        yield "prompt_logprobs", request.prompt_logprobs, Integral, -1, inf
    yield from _sampling_numbers(request.sampling)


def _sampling_numbers(sampling: Sampling) -> Iterator[_Number]:
    yield "temperature", sampling.temperature, Real, 0, 100
    yield "top_p", sampling.top_p, Real, _LEAST_FLOAT, 1
    yield "min_p", sampling.min_p, Real, 0, 1
    yield "presence_penalty", sampling.presence_penalty, Real, -2, 2
    yield "frequency_penalty", sampling.frequency_penalty, Real, -2, 2
    yield "repetition_penalty", sampling.repetition_penalty, Real, _LEAST_FLOAT, 2
    if sampling.top_k not in (None, -1):
        yield "top_k", sampling.top_k, Integral, 1, inf
    if sampling.seed is not None:
        yield "seed", sampling.seed, Integral, 0, inf


def _range(least: float, most: float) -> str:
    start = "above 0" if least == _LEAST_FLOAT else f"from {least:g}"
    return start if most == inf else f"{start} to {most:g}"


def _check_capture(request: CompletionRequest, capture: CaptureAsk, n_layers: int) -> None:
    if request.n > 1:
        raise InvalidInput(f"a capture takes one sample of each prompt; got n={request.n}.")
    if request.stream:
        raise InvalidInput("a capture does not stream: its rows come with the whole answer; ask for one of the two.")
    beyond = [layer for layer in capture.layers if not 0 <= layer < n_layers]
    if beyond or not capture.layers:
        named = f"layer {beyond[0]}" if beyond else "no layer"
        raise InvalidInput(f"the capture names {named}; the model's layers are 0 to {n_layers - 1}.")
    if capture.dtype not in _DTYPES:
        raise InvalidInput(f"a capture's dtype is {' or '.join(_DTYPES)}; got {capture.dtype!r}.")
    places = capture.positions
    named_by_word = isinstance(places, str) and places in _WORDS
    if not named_by_word and not (isinstance(places, tuple) and places and min(places) >= 0):
        raise InvalidInput(
            f"a capture's positions are {', '.join(map(repr, _WORDS))} or a tuple of positions, 0 or more, at least "
            f"one; got {places!r}."
        )
