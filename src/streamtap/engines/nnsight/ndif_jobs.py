"""One trace as a job of NDIF: sent, waited for, and what goes wrong told as an error of ours."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
import websocket
from nnsight.intervention.backends.remote import RemoteBackend, RemoteError
from nnsight.schema.response import Status

from streamtap.errors import (
    EngineFailed,
    EngineOutOfMemory,
    InvalidInput,
    InvalidKey,
    MissingAuthorization,
    ModelNotFound,
    StreamtapError,
    TransferFailed,
    Unsupported,
)

T = TypeVar("T")

#: What ``asked_of`` tells for what it is.
_TOLD_APART = (RemoteError, httpx.HTTPError, websocket.WebSocketException, OSError)
#: Where a key comes from.
LOGIN = "https://login.ndif.us"
_CONNECT_SECONDS = 30.0
#: A job may wait long for its model, and nothing is said meanwhile; a dead connection shows by its pings.
_PING_SECONDS, _MOST_PINGS = 30.0, 240
_LONGEST_REASON = 300
_NOT_SERVED = ("could not deploy this model", "no such model", "not deployed")
_TOO_LARGE = ("outofmemoryerror", "out of memory")
_OF_A_KEY = ("api key", "api-key")


@dataclass(frozen=True)
class NdifPlace:
    """Where jobs go: ``host`` is ``http(s)://…``; ``model_key`` and ``environment`` say what runs them, and how.

    ``is_ndif`` tells NDIF itself, whose key the environment has, from other servers, whose key a caller gives.
    """

    host: str
    model_key: str
    environment: Mapping[str, Any] = field(default_factory=dict)
    api_key: str | None = field(default=None, repr=False)
    is_ndif: bool = True

    @property
    def name(self) -> str:
        """The host without what may stand before it: a name and a password."""
        parts = urlsplit(self.host)
        return (parts.hostname or "?") + (f":{parts.port}" if parts.port else "")


def model_key(name: str, revision: str | None) -> str:
    """What NDIF calls a model: the class that wraps it, and which checkpoint."""
    about = json.dumps({"repo_id": name, "revision": revision, "task": "text-generation"})
    return f"nnsight.modeling.transformers.TransformersModel:{about}"


class NdifJob(RemoteBackend):  # type: ignore[misc]
    """Runs one trace at ``place``: quietly, where nnsight's own draws a status line, and never waiting for ever."""

    def __init__(self, place: NdifPlace) -> None:
        super().__init__(place.model_key, host=place.host, env=dict(place.environment))
        self.api_key = place.api_key or ""  # where it is given none, nnsight takes NDIF's, for any server
        self.display.enabled = False
        self._place = place

    def request(self, request: Any, tracer: Any) -> Any:
        """Send the trace, and give what it saved once the job is done; its word comes over one socket."""
        blob = self._serialize(tracer)
        with _Reading(self._place):
            return self._saved(request, blob)

    def _saved(self, request: Any, blob: bytes) -> Any:
        header = {"ndif-api-key": self.api_key} if self.api_key else None
        socket = websocket.create_connection(
            f"{self.ws_host}/subscribe",
            timeout=_CONNECT_SECONDS,
            header=header,
            redirect_limit=0,  # another server would be told the key, too
        )
        with closing(socket):
            request.session_id = json.loads(_said(socket.recv()))["session_id"]
            self.send(request, blob)
            socket.settimeout(_PING_SECONDS)
            while True:
                response = self.parse(_said(_next_word(socket)))
                saved = self.handle(response)
                if response.status == Status.COMPLETED:
                    return saved


class _Reading:
    """Around all that ``place`` says: what cannot be read is told as that.

    No ``except``, since bytes that mean nothing come out of zstd and torch as plain ``Exception``.
    """

    def __init__(self, place: NdifPlace) -> None:
        self._place = place

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: Any, error: BaseException | None, _trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, _TOLD_APART):
            raise TransferFailed(
                f"{self._place.name} answered with what cannot be read ({type(error).__name__}); is it NDIF, or a "
                "server that speaks as NDIF does?"
            ) from _shown(self._place, error)


def asked_of(place: NdifPlace, ask: Callable[[], T]) -> T:
    """What ``ask``, which runs an ``NdifJob``, gives.

    Raises:
        MissingAuthorization: it wants a key.
        InvalidKey: it does not take this one.
        InvalidInput: at this address is something else.
        ModelNotFound: it does not serve the model.
        Unsupported: it does not take a request of this release of nnsight.
        EngineOutOfMemory: the job did not fit there.
        EngineFailed: the job failed.
        TransferFailed: the way there failed, what came cannot be read, or it is not serving now.
    """
    try:
        return ask()
    except RemoteError as error:
        raise _told(place, error) from _shown(place, error)
    except websocket.WebSocketBadStatusException as error:
        raise _refused(place, error.status_code, "") from error
    except httpx.HTTPStatusError as error:
        raise TransferFailed(
            f"{place.name} ran the job, but its result could not be fetched: HTTP {error.response.status_code}."
        ) from error
    except (httpx.HTTPError, websocket.WebSocketException, OSError) as error:
        raise _unreached(place, error) from error


def _shown(place: NdifPlace, error: Exception) -> Exception | None:
    """``error`` as the cause of ours, unless it quotes the key."""
    return None if place.api_key and place.api_key in str(error) else error


def _said(word: Any) -> Any:
    """``word``; nothing at all is how a socket tells that the server said goodbye."""
    if not word:
        raise websocket.WebSocketConnectionClosedException("the server closed the connection")
    return word


def _next_word(socket: Any) -> Any:
    for _ in range(_MOST_PINGS):
        try:
            return socket.recv()
        except websocket.WebSocketTimeoutException:
            socket.ping()
    return socket.recv()


def _told(place: NdifPlace, error: RemoteError) -> StreamtapError:
    cause = error.__cause__
    if isinstance(cause, httpx.HTTPStatusError):
        return _refused(place, cause.response.status_code, str(error))
    if isinstance(cause, httpx.HTTPError):
        return _unreached(place, cause)
    said, reason = str(error).lower(), _reason(place, str(error))
    if any(words in said for words in _NOT_SERVED):
        return ModelNotFound(f"{place.name} does not serve this model: {reason}")
    if any(words in said for words in _TOO_LARGE):
        return EngineOutOfMemory(f"a job did not fit into the memory of {place.name}: {reason}")
    return EngineFailed(f"a job failed at {place.name}: {reason}")


def _refused(place: NdifPlace, status: int, said: str) -> StreamtapError:
    """The error of an answer that is no good; ``said`` may quote the key, and is not repeated where it is about one."""
    if status == 401 and not place.api_key:
        way = f"set NDIF_API_KEY; {LOGIN} gives one" if place.is_ndif else "pass api_key=; NDIF's goes to NDIF alone"
        return MissingAuthorization(f"{place.name} wants an API key: {way}.")
    if status in (401, 403) or (status == 400 and any(words in said.lower() for words in _OF_A_KEY)):
        way = f"NDIF_API_KEY; {LOGIN} gives another" if place.is_ndif else "api_key="
        return InvalidKey(f"{place.name} does not take this API key: check {way}.")
    reason = _reason(place, said) or f"HTTP {status}"
    if status in (400, 422):
        return Unsupported(f"{place.name} does not take this request: {reason}")
    if status == 404 or status < 400:
        return InvalidInput(f"{place.name} answers, but not as NDIF does (HTTP {status}); check the address.")
    return TransferFailed(f"{place.name} is not serving now: {reason}")


def _unreached(place: NdifPlace, error: BaseException) -> TransferFailed:
    return TransferFailed(f"the way to {place.name} failed ({type(error).__name__}); is the address right, and up?")


def _reason(place: NdifPlace, said: str) -> str:
    """The last line of what a server said, which of a traceback is the error itself; without the key."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    last = lines[-1].removeprefix("Failed to send request: ") if lines else ""
    if place.api_key:
        last = last.replace(place.api_key, "…")
    return last if len(last) <= _LONGEST_REASON else last[:_LONGEST_REASON] + "…"
