"""The dialect that every engine process speaks: vLLM's completions, with vllm-lens's arguments and three of our own.

::

    {"model", "prompt", "max_tokens", …, "vllm_xargs": {
        "output_residual_stream": [3, 7],            a list, or true; either may be JSON in a string
        "apply_steering_vectors": "[{…}]",           JSON in a string
        "output_positions", "output_dtype"           ours, as is position_spans inside a vector
    }}

A vLLM is sent ``to_vllm``, which has nothing of ours in it.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from streamtap.completion import CaptureAsk, CompletionRequest
from streamtap.errors import BadJson, InvalidInput
from streamtap.wire.reading import read_json, write_json
from streamtap.wire.requests import read_mapping
from streamtap.wire.steering import vector_body

#: Arguments that stand at the top of a body of ours, and in here in one of vLLM's.
_ARGUMENTS = ("output_residual_stream", "output_positions", "output_dtype", "apply_steering_vectors")

#: Below it, vLLM takes a temperature for 0.
_GREEDY = 1e-5


@dataclass(frozen=True)
class DialectOptions:
    """What a body in the dialect says beside the request."""

    model: str | None = None
    stream: bool = False
    include_usage: bool = False


def to_dialect(request: CompletionRequest, *, model: str, stream: bool, include_usage: bool) -> dict[str, Any]:
    """``request`` as a body for an engine process that serves ``model``.

    Sampling is always written out: vLLM takes what is left out from the checkpoint's own generation settings.

    Raises:
        InvalidInput: prompts of text and of token ids in one request.
    """
    body: dict[str, Any] = {
        "model": model,
        "prompt": _prompt(request.prompts),
        "max_tokens": request.max_tokens,
        "n": request.n,
        **_sampling(request),
        "echo": request.echo,
        "add_special_tokens": request.add_special_tokens,
        "stream": stream,
    }
    optional = {"stop": list(request.stop), "logprobs": request.logprobs, "prompt_logprobs": request.prompt_logprobs}
    body |= {name: value for name, value in optional.items() if value not in (None, [])}
    if stream:
        body["stream_options"] = {"include_usage": include_usage}
    if arguments := _arguments(request):
        body["vllm_xargs"] = arguments
    return body


def to_vllm(request: CompletionRequest, *, model: str, stream: bool, include_usage: bool) -> dict[str, Any]:
    """``request`` as a body for a ``vllm serve`` with vllm-lens, whose rows come at every position, as they are made.

    Raises:
        InvalidInput: as ``to_dialect``.
    """
    capture = request.capture
    plain = request if capture is None else replace(request, capture=CaptureAsk(capture.layers))
    body = to_dialect(plain, model=model, stream=stream, include_usage=include_usage)
    if request.n > 1 and request.sampling.temperature < _GREEDY:
        # It refuses several greedy samples; to draw from the likeliest alone is the same.
        body |= {"temperature": 1.0, "top_k": 1}
    if capture is not None and not request.echo:  # which it leaves out for those
        body["return_token_ids"] = True
    if request.steering:
        # Of a steered prompt, keys and values lie in vLLM's prefix cache as if they were the plain prompt's.
        body["cache_salt"] = secrets.token_urlsafe(16)
    return body


def from_dialect(body: Mapping[str, Any], *, n_layers: int, hidden: int) -> tuple[CompletionRequest, DialectOptions]:
    """The request that ``body`` asks of a model of ``n_layers`` blocks and width ``hidden``, and how to answer it.

    Raises:
        InvalidInput: the body is not one, or does not fit the model.
    """
    checked = read_mapping(_lifted(body), most_data_bytes=None)
    if checked.max_tokens is None:
        raise InvalidInput("max_tokens is required of an engine: a whole number from 0 to 1000000.")
    request = checked.to_request(max_tokens=checked.max_tokens, n_layers=n_layers, hidden=hidden)
    return request, DialectOptions(checked.model, checked.streams, checked.include_usage)


def _prompt(prompts: tuple[str | tuple[int, ...], ...]) -> str | list[Any]:
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if 0 < len(texts) < len(prompts):
        raise InvalidInput("prompts of one request must all be text or all be token ids; send two requests.")
    written: list[Any] = [prompt if isinstance(prompt, str) else list(prompt) for prompt in prompts]
    return written[0] if len(written) == 1 else written


def _sampling(request: CompletionRequest) -> dict[str, Any]:
    values = asdict(request.sampling)
    values["top_k"] = -1 if request.sampling.top_k is None else request.sampling.top_k
    return {name: value for name, value in values.items() if value is not None}


def _arguments(request: CompletionRequest) -> dict[str, Any]:
    arguments = {} if request.capture is None else _capture(request.capture)
    if request.steering:
        arguments["apply_steering_vectors"] = write_json(list(map(vector_body, request.steering))).decode()
    return arguments


def _capture(capture: CaptureAsk) -> dict[str, Any]:
    """What an engine that knows vllm-lens alone needs is all that is written where nothing else was asked."""
    asked: dict[str, Any] = {"output_residual_stream": list(capture.layers)}
    if capture.positions != "all":
        places = capture.positions
        asked["output_positions"] = list(places) if isinstance(places, tuple) else places
    if capture.dtype != "bfloat16":
        asked["output_dtype"] = capture.dtype
    return asked


def _lifted(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body with vLLM's arguments where ours has them."""
    if not isinstance(body, Mapping):
        raise InvalidInput("the body must be a JSON object.")
    arguments = body.get("vllm_xargs") or {}
    if not isinstance(arguments, Mapping):
        raise InvalidInput("vllm_xargs must be an object.")
    if unknown := next((name for name in arguments if name not in _ARGUMENTS), None):
        raise InvalidInput(f"vllm_xargs.{unknown[:64]} is not an argument here; there are {', '.join(_ARGUMENTS)}.")
    lifted = {name: _parsed(name, value) for name, value in arguments.items()}
    return {name: value for name, value in body.items() if name != "vllm_xargs"} | lifted


def _parsed(name: str, value: Any) -> Any:
    """A value that may be JSON in a string; ``output_positions`` may be a word as well."""
    if not isinstance(value, str) or name == "output_dtype" or (name == "output_positions" and value[:1] != "["):
        return value
    try:
        return read_json(value)
    except BadJson:
        raise InvalidInput(f"vllm_xargs.{name} must be JSON where it is a string; it is not.") from None
