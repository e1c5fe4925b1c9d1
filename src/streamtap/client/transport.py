"""What both clients tell their HTTP library, and what its failures mean."""

from __future__ import annotations

from typing import Any

import httpx2

import streamtap
from streamtap.client.address import Address
from streamtap.client.answers import NoAnswer
from streamtap.client.calls import Call
from streamtap.errors import InvalidInput, TransferFailed

_CONNECT_SECONDS = 10.0
_UNREACHED = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.ProxyError)


def session_options(address: Address, timeout_seconds: float) -> dict[str, Any]:
    """Arguments for ``httpx2.Client`` and ``httpx2.AsyncClient``.

    Raises:
        InvalidInput: a timeout that is no time.
    """
    if not timeout_seconds > 0:
        raise InvalidInput(f"timeout_seconds must be more than 0; got {timeout_seconds}.")
    connect = min(_CONNECT_SECONDS, timeout_seconds)
    return {
        "headers": {"Authorization": f"Bearer {address.key}", "User-Agent": f"streamtap/{streamtap.__version__}"},
        # The server holds a request while its engine starts, and sends a byte every few seconds.
        "timeout": httpx2.Timeout(timeout_seconds, connect=connect, pool=None),
        "limits": httpx2.Limits(max_connections=None),
        # Followed, a redirect would carry the key to another server.
        "follow_redirects": False,
    }


def request_options(address: Address, call: Call[Any]) -> dict[str, Any]:
    """Arguments for ``build_request``."""
    headers = {"Accept": call.accept} | ({} if call.body is None else {"Content-Type": "application/json"})
    return {"method": call.method, "url": address.base + call.path, "headers": headers, "content": call.body}


def no_answer(error: httpx2.RequestError, address: Address, *, begun: bool, repeatable: bool = True) -> NoAnswer:
    """What it means that the library gave up; ``begun`` says that the answer had begun to come.

    What is not ``repeatable`` may have been done by a server that closed the connection, and is not asked again.

    Its own text is shown for a connection alone: that of a request may quote a header, and so the key.
    """
    if isinstance(error, _UNREACHED) and not begun:
        why = TransferFailed(f"{address.base} cannot be reached ({error}); is the server running there?")
        return NoAnswer(why, unheard=True)
    why, unheard = _ended(error, address, begun)
    return NoAnswer(why if repeatable else in_doubt(why), unheard and repeatable)


def in_doubt(error: TransferFailed) -> TransferFailed:
    """The error where what was asked may have been done, so that to ask again may do it twice."""
    doubted = TransferFailed(f"{error} What was asked may have been begun; look before you ask again.")
    vars(doubted)["retryable"] = False
    return doubted


def _ended(error: httpx2.RequestError, address: Address, begun: bool) -> tuple[TransferFailed, bool]:
    if begun:
        return broke_off(error), False
    if isinstance(error, httpx2.TimeoutException):
        return TransferFailed(f"{address.base} sent nothing for as long as timeout_seconds."), False
    return TransferFailed(f"{address.base} closed the connection ({_kind(error)})."), True


def broke_off(error: httpx2.RequestError) -> TransferFailed:
    """What it means that an answer ended before its end; its first bytes are good for nothing."""
    return TransferFailed(f"the server's answer broke off ({_kind(error)}).")


def _kind(error: Exception) -> str:
    return type(error).__name__
