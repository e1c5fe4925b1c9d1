"""Every error as one HTTP answer, and the edge where a true fault becomes ``internal_error``."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from streamtap import errors
from streamtap.errors import StreamtapError
from streamtap.server.log import note
from streamtap.server.surface.trace import Trace, trace_of
from streamtap.wire.errors import error_body

#: The first class that an error is one of decides its status.
_STATUSES: tuple[tuple[type[StreamtapError], int], ...] = (
    (errors.ScopeDenied, 403),
    (errors.AccessDenied, 403),
    (errors.KeyRefused, 401),
    (errors.NotFound, 404),
    (errors.MethodNotAllowed, 405),
    (errors.HarvestNotCancellable, 409),
    (errors.RequestTooLarge, 413),
    (errors.LimitReached, 429),
    (errors.InvalidInput, 400),
    (errors.Unsupported, 400),
    (errors.EngineFailed, 502),
    (errors.EngineOutOfMemory, 502),
    (errors.NotServing, 503),
)
#: When to come back where the error does not know better, in seconds.
_RETRY_SECONDS: tuple[tuple[type[StreamtapError], int], ...] = (
    (errors.QueueFull, 5),
    (errors.HarvestConcurrencyExceeded, 30),
    (errors.HarvestCapacityExceeded, 30),
    (errors.LimitReached, 60),
    (errors.CircuitOpen, 60),
    (errors.ColdStart, 30),
    (errors.HarvestUnavailable, 30),
    (StreamtapError, 5),
)
#: What the log calls a request whose client left; nobody sees it as an answer.
CLIENT_GONE_STATUS = 499

Problem = tuple[int, list[tuple[bytes, bytes]], bytes]


def status_of(error: BaseException) -> int:
    """The HTTP status of an error, 500 where it is nobody's but ours."""
    if isinstance(error, ClientDisconnect):
        return CLIENT_GONE_STATUS
    return next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)


def code_of(error: BaseException) -> str | None:
    """The code of an error for programs; None for a client that left."""
    if isinstance(error, ClientDisconnect):
        return None
    return error.code if isinstance(error, StreamtapError) else StreamtapError.code


def problem(error: StreamtapError, trace: Trace) -> Problem:
    """Status, headers and body of an error's answer; a caller who may retry is told when."""
    _know_when(error)
    trace.code = error.code
    body = error_body(error, trace.request_id)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if error.retry_after_seconds is not None:
        headers.append((b"retry-after", str(error.retry_after_seconds).encode()))
    if isinstance(error, errors.KeyRefused):
        headers.append((b"www-authenticate", b"Bearer"))
    return status_of(error), headers, body


def late_problem(error: StreamtapError, trace: Trace) -> bytes:
    """Body of an error whose status is already sent."""
    _know_when(error)
    trace.code = error.code
    return error_body(error, trace.request_id)


async def send_problem(error: StreamtapError, trace: Trace, send: Send) -> None:
    """Send an error's whole answer."""
    status, headers, body = problem(error, trace)
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _know_when(error: StreamtapError) -> None:
    if error.retryable and error.retry_after_seconds is None:
        error.retry_after_seconds = next(seconds for kind, seconds in _RETRY_SECONDS if isinstance(error, kind))


def as_known(error: BaseException) -> StreamtapError:
    """``error`` itself where it is one of ours, else the sentence that a caller may see of a fault."""
    if isinstance(error, StreamtapError):
        return error
    return StreamtapError("the server failed on this request; report its request_id to whoever runs the server.")


async def guarded(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Run ``app``; whatever it raises becomes an answer, or breaks the connection where one has begun.

    The log gets the class of a fault and where it was raised, for its message may hold a prompt.
    """
    trace = trace_of(scope)
    try:
        await app(scope, receive, send)
    except ClientDisconnect:
        trace.status = CLIENT_GONE_STATUS
    except ConnectionAbortedError:
        raise
    except Exception as error:
        note("fault", request_id=trace.request_id, error=type(error).__name__, at=_place(error))
        if trace.status:
            trace.code = StreamtapError.code
            raise ConnectionAbortedError("an answer was broken off") from None
        await send_problem(as_known(error), trace, send)


def _place(error: BaseException) -> str:
    trail = error.__traceback__
    while trail is not None and trail.tb_next is not None:
        trail = trail.tb_next
    return f"{trail.tb_frame.f_globals.get('__name__')}:{trail.tb_lineno}" if trail is not None else ""


async def _of_routing(request: Request, error: Exception) -> Response:
    """What Starlette says of an address or method that nobody serves, in our words."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    return _response(request, _ROUTING.get(status, _not_found)(request), getattr(error, "headers", None))


def _not_found(request: Request) -> StreamtapError:
    return errors.NotFound("there is nothing at this address; GET /openapi.json lists what there is.")


def _no_such_method(request: Request) -> StreamtapError:
    return errors.MethodNotAllowed(
        "this address takes other methods; the Allow header and GET /openapi.json list them."
    )


_ROUTING: dict[int, Callable[[Request], StreamtapError]] = {405: _no_such_method}


async def _of_ours(request: Request, error: Exception) -> Response:
    return _response(request, as_known(error), None)


def _response(request: Request, error: StreamtapError, more: Any) -> Response:
    status, headers, body = problem(error, trace_of(request.scope))
    told = {name.decode(): value.decode() for name, value in headers}
    return Response(body, status, {**(more or {}), **told})


Handler = Callable[[Request, Any], Coroutine[Any, Any, Response]]
#: For FastAPI, which raises its own where no route fits.
HANDLERS: dict[int | type[Exception], Handler] = {HTTPException: _of_routing, StreamtapError: _of_ours}
