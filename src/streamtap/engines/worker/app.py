"""The HTTP application of an engine process: health, its model, completions."""

from __future__ import annotations

import hmac
import logging
import os
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from streamtap.completion import Failed, Finished
from streamtap.engines.base import Completes
from streamtap.engines.worker.clients import Client, request_id_of
from streamtap.engines.worker.completing import Completing
from streamtap.engines.worker.stages import Loading
from streamtap.engines.worker.statuses import status_of
from streamtap.errors import (
    ColdStart,
    InvalidKey,
    MethodNotAllowed,
    MissingAuthorization,
    NotFound,
    ServerRestarting,
    StreamtapError,
)
from streamtap.wire.errors import error_body

_LOG = logging.getLogger(__name__)


class Worker:
    """One engine process as its application sees it.

    Args:
        loading: The engine, or how far it is.
        name: What the model is called, in requests and answers.
        key: What a bearer must present; None lets everyone in.
        keepalive_seconds: How long a stream may be silent.
    """

    def __init__(self, loading: Loading, *, name: str, key: str | None = None, keepalive_seconds: float = 5.0) -> None:
        self.loading = loading
        self.name = name
        self.is_closing = False
        self._key = None if key is None else key.encode()
        # As many answers are encoded side by side as there are cores; two more keep short work from waiting behind.
        threads = ThreadPoolExecutor((os.cpu_count() or 1) + 2, thread_name_prefix="streamtap-answer")
        self.completing = Completing(name, threads, keepalive_seconds)

    @property
    def live(self) -> int:
        """Requests that hold anything of the engine."""
        return len(self.completing.live)

    def check_bearer(self, authorization: str | None) -> None:
        """Let whoever has the key in.

        Raises:
            MissingAuthorization: no key was sent.
            InvalidKey: another one was.
        """
        if self._key is None:
            return
        kind, _, presented = (authorization or "").partition(" ")
        if kind.lower() != "bearer" or not presented:
            raise MissingAuthorization("this engine asks for 'Authorization: Bearer' and its key; none was sent.")
        if not hmac.compare_digest(presented.strip().encode(), self._key):
            raise InvalidKey("this engine does not know the key that was sent.")

    def ready_engine(self) -> Completes:
        """The engine, if it takes requests now.

        Raises:
            ServerRestarting: the process is about to end.
            ColdStart: the model is still loading.
            StreamtapError: it could not be loaded.
        """
        if self.is_closing:
            raise ServerRestarting("this engine is about to stop; send the request again in a moment.")
        if self.loading.error is not None:
            raise self.loading.error
        if self.loading.engine is None:
            raise ColdStart(f"this engine is not ready yet: {self.loading.view()['stage_label']}.")
        return self.loading.engine


def create_app(worker: Worker) -> Starlette:
    """The application over ``worker``."""
    routes = [
        Route("/health", _Health(worker), methods=["GET"]),
        Route("/v1/models", _Models(worker), methods=["GET"]),
        Route("/v1/completions", _Completions(worker), methods=["POST"]),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _not_served})


class _Health:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._response(Request(scope))(scope, receive, send)

    def _response(self, request: Request) -> Response:
        error = self._worker.loading.error
        if error is not None:
            return _refusal(request, error, status=500)
        view: dict[str, Any] = {**self._worker.loading.view(), "live": self._worker.live}
        return JSONResponse(view, 200 if self._worker.loading.engine is not None else 503)


class _Models:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope)
        try:
            self._worker.check_bearer(request.headers.get("authorization"))
            response: Response = JSONResponse({"object": "list", "data": [self._model(self._worker.ready_engine())]})
        except StreamtapError as error:
            response = _refusal(request, error)
        await response(scope, receive, send)

    def _model(self, engine: Completes) -> dict[str, Any]:
        about, tokenizer = engine.provenance, engine.tokenizer
        known = {
            "id": self._worker.name,
            "object": "model",
            "owned_by": "streamtap",
            "root": about.model,
            "max_model_len": tokenizer.context_length,
            "n_layers": about.n_layers,
            "hidden_size": about.hidden,
            "vocabulary": tokenizer.vocabulary,
            "dtype": about.dtype,
        }
        return {name: value for name, value in known.items() if value is not None}


class _Completions:
    """The outermost loop of a request: nothing that goes wrong in one may reach another, or pass for an answer."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        client, began = Client(scope, receive, send), time.monotonic()
        try:
            outcome = await self._outcome(client)
            if isinstance(outcome, Failed) and client.status is None:
                await client.refuse(outcome.error)
        except ClientDisconnect:
            outcome = None
        finally:
            client.leave()
        _LOG.info("%s %s in %.3f s", client.request_id, _counts(client, outcome), time.monotonic() - began)

    async def _outcome(self, client: Client) -> Finished | Failed:
        try:
            self._worker.check_bearer(client.headers.get("authorization"))
            return await self._worker.completing.answer(client, self._worker.ready_engine())
        except ClientDisconnect:
            raise
        except StreamtapError as error:
            return Failed(error)
        except Exception as error:
            # Its text may hold the caller's; where it happened is enough to find it.
            _LOG.error("%s failed: %s at %s", client.request_id, type(error).__name__, _where(error))
            return Failed(StreamtapError("the engine's process failed at this request; its log says where."))


def _counts(client: Client, outcome: Finished | Failed | None) -> str:
    if outcome is None:
        return f"{client.status or '-'} client left after {client.sent_bytes} bytes"
    if isinstance(outcome, Failed):
        return f"{client.status or '-'} {outcome.error.code} after {client.sent_bytes} bytes"
    usage = outcome.usage
    rows = sum(len(choice.rows.positions) for choice in outcome.choices if choice.rows is not None)
    return (
        f"{client.status} {len(outcome.choices)} choices, {usage.prompt_tokens} + {usage.completion_tokens} tokens, "
        f"{rows} rows, {client.sent_bytes} bytes"
    )


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    return " < ".join(f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in reversed(frames))


def _refusal(request: Request, error: StreamtapError, status: int | None = None) -> Response:
    body = error_body(error, request_id_of(request.headers))
    return Response(body, status or status_of(error), media_type="application/json")


def _not_served(request: Request, error: Exception) -> Response:
    allowed = isinstance(error, HTTPException) and error.status_code == 405
    if allowed:
        return _refusal(request, MethodNotAllowed(f"{request.url.path} does not take {request.method}."))
    return _refusal(request, NotFound(f"an engine's process has nothing at {request.url.path}."))
