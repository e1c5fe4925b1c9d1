"""A completion that is asked for, as the JSON body of its request."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from streamtap.client.arrays import as_ints
from streamtap.client.options import CompletionOptions
from streamtap.completion import CompletionRequest, Sampling, SteeringVector
from streamtap.errors import InvalidInput
from streamtap.wire.steering import vector_body

#: One text, several, one prompt of token ids, several; or a request that says all by itself.
PromptLike = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]] | CompletionRequest

#: What may stand beside a whole request, since it is of the server and not of the completion.
_BESIDE_A_REQUEST = {"user"}
_KNOWN = CompletionOptions.__optional_keys__


def completion_body(prompt: PromptLike, model: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """The body for ``prompt``, or for a whole request, without what was not said.

    Raises:
        InvalidInput: an option that there is not, or one beside a whole request that says it itself.
    """
    if unknown := sorted(set(options) - _KNOWN):
        raise InvalidInput(f"no option {', '.join(unknown)}; there are {', '.join(sorted(_KNOWN))}.")
    said = {name: value for name, value in options.items() if value is not None}
    if isinstance(prompt, CompletionRequest):
        if doubled := sorted(set(said) - _BESIDE_A_REQUEST):
            raise InvalidInput(f"a CompletionRequest says all of itself; {', '.join(doubled)} cannot stand beside it.")
        body = {"prompt": _one_or_all(prompt.prompts), **_asked(prompt), **said}
    else:
        body = {"prompt": _prompt(prompt), **{name: _plain(name, value) for name, value in said.items()}}
    return body if model is None else {"model": model, **body}


def encoded(body: Mapping[str, Any]) -> bytes:
    """The body as JSON.

    Raises:
        InvalidInput: NaN or infinity, half a surrogate pair, or what JSON cannot say.
    """
    try:
        return json.dumps(body, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        # Their texts may quote the prompt, so neither is shown nor chained.
        kind = type(error).__name__
    raise InvalidInput(
        f"the request cannot be written as JSON ({kind}): it holds NaN, infinity, broken text or an object."
    )


def _prompt(prompt: Any) -> Any:
    if isinstance(prompt, str):
        return prompt
    items = _items(prompt)
    if all(isinstance(item, str) for item in items):
        return items
    if any(isinstance(item, str) for item in items):
        raise InvalidInput("prompt must be all texts or all token ids; it holds both.")
    one = all(not hasattr(item, "__len__") for item in items)
    return list(as_ints(items, "token ids")) if one else [list(as_ints(item, "token ids")) for item in items]


def _items(prompt: Any) -> list[Any]:
    plain = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if isinstance(plain, bytes | Mapping) or not isinstance(plain, Iterable):
        raise InvalidInput(
            f"prompt must be a text, a list of texts, a list of token ids or a list of such lists; "
            f"got {type(prompt).__name__}."
        )
    return list(plain)


def _one_or_all(prompts: Sequence[str | tuple[int, ...]]) -> Any:
    plain = [_prompt(prompt) for prompt in prompts]
    if len({isinstance(prompt, str) for prompt in plain}) > 1:
        raise InvalidInput("prompts must be all texts or all token ids; the request holds both.")
    return plain[0] if len(plain) == 1 else plain


def _asked(request: CompletionRequest) -> dict[str, Any]:
    """What a request says, as options; what is as ever is left to the server, which may know less."""
    sampling, usual = asdict(request.sampling), asdict(Sampling())
    asked: dict[str, Any] = {"max_tokens": request.max_tokens}
    asked |= {name: value for name, value in sampling.items() if value != usual[name]}
    asked |= {name: value for name in ("logprobs", "prompt_logprobs") if (value := getattr(request, name)) is not None}
    asked |= {"n": request.n} if request.n != 1 else {}
    asked |= {"stop": list(request.stop)} if request.stop else {}
    asked |= {"echo": True} if request.echo else {}
    asked |= {} if request.add_special_tokens else {"add_special_tokens": False}
    asked |= (
        {"apply_steering_vectors": [vector_body(vector) for vector in request.steering]} if request.steering else {}
    )
    return asked | _captured(request)


def _captured(request: CompletionRequest) -> dict[str, Any]:
    if (ask := request.capture) is None:
        return {}
    positions = ask.positions if isinstance(ask.positions, str) else list(ask.positions)
    return (
        {"output_residual_stream": list(ask.layers)}
        | ({} if positions == "all" else {"output_positions": positions})
        | ({} if ask.dtype == "bfloat16" else {"output_dtype": ask.dtype})
    )


def _plain(name: str, value: Any) -> Any:
    """An option's value as JSON has it: arrays and numpy's numbers become Python's."""
    if name == "apply_steering_vectors":
        return _vectors(value)
    if name in ("output_residual_stream", "output_positions") and not isinstance(value, bool | str):
        return list(as_ints(_listed(name, value), name))
    if name == "stop" and not isinstance(value, str):
        if not isinstance(value, Iterable):
            raise InvalidInput(f"stop takes a text or a list of texts; got {type(value).__name__}.")
        return list(value)
    return value.item() if hasattr(value, "item") else value


def _vectors(value: Any) -> list[dict[str, Any]]:
    wanted = "apply_steering_vectors takes a list of steering vectors"
    if isinstance(value, SteeringVector | Mapping):
        raise InvalidInput(f"{wanted}; got one by itself.")
    if not isinstance(value, Iterable):
        raise InvalidInput(f"{wanted}; got {type(value).__name__}.")
    return [vector_body(one) if isinstance(one, SteeringVector) else dict(_mapping(one, wanted)) for one in value]


def _mapping(one: Any, wanted: str) -> Mapping[str, Any]:
    if not isinstance(one, Mapping):
        raise InvalidInput(f"{wanted}, each from steering_vector(); one is of type {type(one).__name__}.")
    return one


def _listed(name: str, value: Any) -> Any:
    if not hasattr(value, "__iter__"):
        raise InvalidInput(f"{name} takes a list of whole numbers; got {value!r}.")
    return value
