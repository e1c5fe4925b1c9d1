"""What comes back from a server: an answer that reads, one that refuses, or none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from streamtap.errors import InvalidInput, StreamtapError, TransferFailed
from streamtap.wire.errors import read_error

#: Statuses of an answer that is what was asked for, unless an error stands in it.
TAKEN = (HTTPStatus.OK, HTTPStatus.ACCEPTED)

#: An error's body is far smaller; a completion that is larger is parsed once, as a completion.
_LARGEST_ERROR_BYTES = 1 << 20


@dataclass(frozen=True)
class Answer:
    """A whole answer; ``headers`` are found in any case."""

    status: int
    headers: Mapping[str, str] = field(repr=False)
    body: bytes = field(repr=False)


@dataclass(frozen=True)
class NoAnswer:
    """``error`` says why; where the server had not begun to answer, it is ``unheard`` and may be asked again."""

    error: StreamtapError
    unheard: bool


def media_type(headers: Mapping[str, str]) -> str:
    """The content type without its parameters."""
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def may_hold_an_error(answer: Answer) -> bool:
    """Whether the body must be looked into for an error before it is read as what was asked for."""
    return answer.status != HTTPStatus.OK or len(answer.body) <= _LARGEST_ERROR_BYTES


def read_mapping(answer: Answer) -> dict[str, Any]:
    """The JSON object of an answer.

    Raises:
        StreamtapError: the error that the server reports, by the status or inside the body, as its class.
        TransferFailed: not a JSON object, as where the answer broke off.
    """
    found = read_object(answer.body)
    if answer.status not in TAKEN or (found and found.get("error") is not None):
        raise _refusal(answer, found)
    if found is None:
        raise TransferFailed(
            f"the server's answer ({len(answer.body)} bytes of {media_type(answer.headers) or 'no type'}) is not the "
            "JSON that was expected: it broke off, or the address is not this service's."
        )
    return found


def _refusal(answer: Answer, found: dict[str, Any] | None) -> StreamtapError:
    if 300 <= answer.status < 400:
        return InvalidInput(f"the server answers {answer.status}: what is asked lies elsewhere; give that address.")
    # Something between the server and us has no body of the service's shape.
    strange = {
        "message": f"the server answered {answer.status} without a reason; is its address right, with /v1 at the end?"
    }
    error = read_error(found if found and found.get("error") is not None else strange, answer.status)
    if error.retry_after_seconds is None:
        error.retry_after_seconds = retry_after(answer.headers)
    return error


def read_object(body: bytes) -> dict[str, Any] | None:
    """A JSON object, None where it is none."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def retry_after(headers: Mapping[str, str]) -> int | None:
    """Seconds that ``Retry-After`` names."""
    text = headers.get("retry-after", "").strip()
    return int(text) if text.isdecimal() and len(text) < 10 else None
