"""The one shape of an error on the wire, both ways.

::

    {"error": {"message", "type", "code", "retryable", …}, "request_id"}
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import orjson

from streamtap.errors import (
    AccessDenied,
    CaptureMissed,
    EngineFailed,
    HarvestNotCancellable,
    InvalidInput,
    InvalidKey,
    InvalidPrompt,
    KeyRefused,
    LimitReached,
    MethodNotAllowed,
    NotFound,
    NotServing,
    RequestTooLarge,
    ScopeDenied,
    StreamtapError,
    Unsupported,
)

#: OpenAI's word for each branch of the tree; the first that fits holds, and what is left is the server's fault.
_TYPES: tuple[tuple[tuple[type[StreamtapError], ...], str], ...] = (
    ((ScopeDenied, AccessDenied), "permission_error"),
    ((KeyRefused,), "authentication_error"),
    ((LimitReached,), "rate_limit_error"),
    ((NotFound,), "not_found_error"),
    ((InvalidInput, Unsupported, MethodNotAllowed, RequestTooLarge, HarvestNotCancellable), "invalid_request_error"),
)
#: What an error is where its code is not one of ours.
_BY_STATUS: dict[int, type[StreamtapError]] = {
    401: InvalidKey,
    403: ScopeDenied,
    404: NotFound,
    405: MethodNotAllowed,
    413: RequestTooLarge,
    429: LimitReached,
    503: NotServing,
}
#: Attributes that a class promises, where a server left them out.
_PROMISED: dict[type[StreamtapError], dict[str, Any]] = {InvalidPrompt: {"index": 0}, CaptureMissed: {"layer": -1}}
_WRITTEN_APART = frozenset({"message", "type", "code", "retryable", "request_id"})
_NOT_SETTABLE = frozenset(dir(StreamtapError)) - {"retry_after_seconds"} | _WRITTEN_APART


def error_document(error: StreamtapError, request_id: str | None) -> dict[str, Any]:
    """The error as it stands in a body: its public attributes beside message, type, code and ``retryable``."""
    public = {name: value for name, value in vars(error).items() if not name.startswith("_")}
    extra = {name: value for name, value in public.items() if name not in _WRITTEN_APART and _is_plain(value)}
    if error.retry_after_seconds is not None:
        extra["retry_after_seconds"] = error.retry_after_seconds
    shown = {"message": str(error), "type": _type_of(error), "code": error.code, "retryable": error.retryable}
    return {"error": {**shown, **extra}, "request_id": request_id}


def error_body(error: StreamtapError, request_id: str | None) -> bytes:
    """The error as a JSON body."""
    return orjson.dumps(error_document(error, request_id))


def read_error(body: Mapping[str, Any], status: int) -> StreamtapError:
    """The error that ``body`` describes, of the class whose code it has, with its message and attributes.

    A code that is not ours, or none, is judged by ``status``, and kept.
    """
    found = body.get("error")
    said: Mapping[str, Any] = found if isinstance(found, Mapping) else {"message": found or body.get("message")}
    kind = _CLASSES.get(str(said.get("code"))) or _by_status(status)
    error = kind.__new__(kind)
    error.args = (str(said.get("message") or f"the server answered with status {status} and no message."),)
    vars(error).update(_attributes(said, kind))
    if isinstance(request_id := body.get("request_id"), str):
        vars(error)["request_id"] = request_id
    return error


def _attributes(said: Mapping[str, Any], kind: type[StreamtapError]) -> dict[str, Any]:
    promised = {
        name: value for base, given in _PROMISED.items() if issubclass(kind, base) for name, value in given.items()
    }
    told = {name: _frozen(value) for name, value in said.items() if _is_settable(name) and _is_plain(value)}
    own = {name: said[name] for name, of in (("code", str), ("retryable", bool)) if isinstance(said.get(name), of)}
    differing = {name: value for name, value in own.items() if value != getattr(kind, name)}
    return promised | {name: value for name, value in told.items() if value is not None} | differing


def _is_settable(name: str) -> bool:
    return name.isidentifier() and not name.startswith("_") and name not in _NOT_SETTABLE


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, str | int | float | bool)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _type_of(error: StreamtapError) -> str:
    return next((name for kinds, name in _TYPES if isinstance(error, kinds)), "server_error")


def _by_status(status: int) -> type[StreamtapError]:
    if 400 <= status < 500:
        return _BY_STATUS.get(status, InvalidInput)
    return _BY_STATUS.get(status, EngineFailed if status >= 500 else StreamtapError)


def _classes() -> dict[str, type[StreamtapError]]:
    """The class nearest to the root that has each code."""
    found: dict[str, type[StreamtapError]] = {}
    queue: deque[type[StreamtapError]] = deque([StreamtapError])
    while queue:
        kind = queue.popleft()
        found.setdefault(kind.code, kind)
        queue.extend(kind.__subclasses__())
    # Its parent is what any refusal of a key is, and a server says this code of a key that it does not know.
    return found | {InvalidKey.code: InvalidKey}


_CLASSES = _classes()
