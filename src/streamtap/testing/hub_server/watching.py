"""What passes through the server: each request with its bytes, counted as they go."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


#: What the client asks about itself, once in a process, is not counted: it would depend on which test comes first.
_UNCOUNTED = ("/api/agent-harnesses", "/api/telemetry")


@dataclass(frozen=True)
class HubRequest:
    """One request as it was answered.

    ``path`` is decoded and without its query; ``status`` is 0 as long as there is no answer; bytes are those of the
    bodies; ``range`` is the header of that name, or None.
    """

    method: str
    path: str
    status: int
    bytes_in: int
    bytes_out: int
    range: str | None


@dataclass
class _Going:
    method: str
    path: str
    range: str | None
    status: int = 0
    bytes_in: int = 0
    bytes_out: int = 0

    def frozen(self) -> HubRequest:
        return HubRequest(self.method, self.path, self.status, self.bytes_in, self.bytes_out, self.range)


@dataclass
class Watch:
    """Requests in the order in which they came."""

    _going: list[_Going] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, scope: Scope) -> _Going:
        """Count from here on for a request."""
        headers = dict(scope["headers"])
        ranged = headers[b"range"].decode("latin-1") if b"range" in headers else None
        going = _Going(scope["method"], scope["path"], ranged)
        if not going.path.startswith(_UNCOUNTED):
            with self._lock:
                self._going.append(going)
        return going

    def requests(self) -> list[HubRequest]:
        """Requests so far, those that are still being answered with what has passed."""
        with self._lock:
            return [going.frozen() for going in self._going]

    def reset(self) -> None:
        """Forget them."""
        with self._lock:
            self._going.clear()


class Watching:
    """The outermost layer of the server: it counts before it sends, so that who got an answer finds it counted."""

    def __init__(self, app: ASGIApp, watch: Watch) -> None:
        self._app = app
        self._watch = watch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        going = self._watch.begin(scope)

        async def counted_receive() -> Message:
            message = await receive()
            going.bytes_in += len(message.get("body", b""))
            return message

        async def counted_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                going.status = message["status"]
            elif going.method != "HEAD":
                going.bytes_out += len(message.get("body", b""))
            await send(message)

        await self._app({**scope, "hang_up": _transport_of(send).close}, counted_receive, counted_send)


def _transport_of(send: Any) -> Any:
    # uvicorn gives an application no way to close a connection; its `send` belongs to what holds the transport.
    return send.__self__.transport
