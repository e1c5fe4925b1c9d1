"""Request bodies and keys as they arrive."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from streamtap.errors import RequestTooLarge

#: Digits of a length that no body has; Python refuses to read far longer numbers.
_MOST_DIGITS = 18


async def read_limited(scope: Scope, receive: Receive, most_bytes: int) -> bytes:
    """The whole body, however it is sent.

    Raises:
        RequestTooLarge: it is larger than ``most_bytes``; no more of it was held.
        ClientDisconnect: the client left before its end.
    """
    if (told := header(scope["headers"], b"content-length")) is not None and told.isdigit():
        _check(int(told) if len(told) <= _MOST_DIGITS else most_bytes + 1, most_bytes)
    held = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        held += message.get("body", b"")
        _check(len(held), most_bytes)
        if not message.get("more_body", False):
            return bytes(held)


def _check(size_bytes: int, most_bytes: int) -> None:
    if size_bytes > most_bytes:
        raise RequestTooLarge(
            f"the body is larger than the {most_bytes} bytes that this server takes; send less at once."
        )


def presented_key(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The bearer key of a request, None where there is none."""
    scheme, _, key = (header(headers, b"authorization") or b"").strip().partition(b" ")
    return key.strip().decode("latin-1") or None if scheme.lower() == b"bearer" else None


def header(headers: Iterable[tuple[bytes, bytes]], wanted: bytes) -> bytes | None:
    """The first header of that name, which is in small letters."""
    return next((value for name, value in headers if name == wanted), None)
