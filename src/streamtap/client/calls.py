"""Each endpoint once, as data: what is sent, and how what comes back is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from streamtap.client.answers import Answer, may_hold_an_error, media_type, read_mapping
from streamtap.client.bodies import PromptLike, completion_body, encoded
from streamtap.client.whole import check_capture
from streamtap.completion import Completion
from streamtap.errors import EngineFailed, InvalidInput, StreamtapError, TransferFailed
from streamtap.wire.completions import read_completion, read_safetensors
from streamtap.wire.safetensors_body import MEDIA_TYPE

T = TypeVar("T")

JSON, EVENTS = "application/json", "text/event-stream"


@dataclass(frozen=True)
class Call(Generic[T]):
    """One request; ``read`` turns its whole answer into what the caller gets, or raises what the server reports.

    ``repeatable`` is False where to ask twice may do a thing twice: then only a connection that never was is tried
    again. Errors of the classes ``at_once`` are raised, whatever the client waits out.
    """

    method: str
    path: str
    read: Callable[[Answer], T]
    body: bytes | None = field(default=None, repr=False)
    accept: str = JSON
    repeatable: bool = True
    at_once: tuple[type[StreamtapError], ...] = ()


def completion_call(
    prompt: PromptLike, model: str | None, binary: bool, options: Mapping[str, Any]
) -> Call[Completion]:
    """A completion, whole; ``binary`` asks for the capture as a safetensors file, which needs no base64.

    Raises:
        InvalidInput: what cannot be asked.
    """
    body = completion_body(prompt, model, options)
    if binary and not body.get("output_residual_stream"):
        raise InvalidInput("binary=True is for captures; ask for one with output_residual_stream, or leave it out.")

    def read(answer: Answer) -> Completion:
        return check_capture(_completion(answer, body), body)

    accept = f"{MEDIA_TYPE}, {JSON};q=0.5" if binary else JSON
    return Call("POST", "/completions", read, encoded(body), accept)


def stream_call(
    prompt: PromptLike, model: str | None, include_usage: bool, options: Mapping[str, Any]
) -> Call[dict[str, Any]]:
    """A completion whose text comes as it is made; ``read`` is for an answer that is no stream, as an error's.

    Raises:
        InvalidInput: what cannot be asked.
    """
    body = completion_body(prompt, model, options) | {"stream": True}
    if include_usage:
        body["stream_options"] = {"include_usage": True}
    return Call("POST", "/completions", read_mapping, encoded(body), EVENTS)


def models_call() -> Call[list[dict[str, Any]]]:
    """The models and what they can."""
    return Call("GET", "/models", read_list)


def model_status_call(model: str) -> Call[dict[str, Any]]:
    """Whether a model is warm, and where its start stands."""
    return Call("GET", f"/models/{quote(model, safe='')}/status", read_mapping)


def usage_call() -> Call[dict[str, Any]]:
    """What the key has used and has left."""
    return Call("GET", "/usage", read_mapping)


def _completion(answer: Answer, body: Mapping[str, Any]) -> Completion:
    asked = body.get("output_residual_stream")
    layers = None if not asked or asked is True else asked
    document: Mapping[str, Any] | bytes = answer.body
    is_file = answer.status == HTTPStatus.OK and media_type(answer.headers) == MEDIA_TYPE
    if not is_file and may_hold_an_error(answer):
        document = read_mapping(answer)
    try:
        return read_safetensors(answer.body, layers=layers) if is_file else read_completion(document, layers=layers)
    except EngineFailed as error:
        # No error of the server's: that was looked for. What came is not whole.
        raise TransferFailed(str(error)) from error


def read_list(answer: Answer) -> list[dict[str, Any]]:
    """The ``data`` of a list.

    Raises:
        StreamtapError: as ``read_mapping``, or there is none.
    """
    found = read_mapping(answer).get("data")
    if not isinstance(found, list):
        raise TransferFailed("the server's list has no 'data'; is the address this service's?")
    return found
