"""What goes back to one client: its status is kept open as long as can be, and nothing half goes out as whole."""

from __future__ import annotations

import asyncio
import math
from typing import Literal

from starlette.types import Send

from streamtap.errors import StreamtapError
from streamtap.server.clock import Clock
from streamtap.server.config import Timing
from streamtap.server.surface.problems import late_problem, send_problem
from streamtap.server.surface.trace import Trace
from streamtap.wire.safetensors_body import MEDIA_TYPE
from streamtap.wire.sse import KEEPALIVE, error_event
from streamtap.wire.sse import MEDIA_TYPE as EVENTS_TYPE

#: ``binary`` is a body that nothing can stand in front of.
Kind = Literal["json", "events", "binary"]
Headers = list[tuple[bytes, bytes]]
_HEADERS: dict[Kind, Headers] = {
    "json": [(b"content-type", b"application/json")],
    "events": [
        (b"content-type", f"{EVENTS_TYPE}; charset=utf-8".encode()),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
    ],
    "binary": [(b"content-type", MEDIA_TYPE.encode())],
}


class Reply:
    """One answer; its pieces come from the work, its words of patience from whoever watches the work."""

    def __init__(self, send: Send, trace: Trace, *, clock: Clock, timing: Timing) -> None:
        self._send = send
        self._trace = trace
        self._clock = clock
        self._timing = timing
        self._lock = asyncio.Lock()
        self._last = trace.started
        self._more: Headers = []
        self.kind: Kind = "json"
        self.begun = False
        self.has_data = False
        self.finished = False

    def add_header(self, name: bytes, value: bytes) -> None:
        """Send this header too."""
        self._more.append((name, value))

    def silent_until(self) -> float:
        """When something must be said so that nobody cuts the connection, on the clock's ``monotonic()``."""
        if self.kind == "binary" or (self.kind == "json" and self.has_data):
            return math.inf
        wait = self._timing.keepalive_seconds if self.begun else self._timing.first_answer_seconds
        return self._last + wait

    async def keep_alive(self) -> None:
        """Commit the status 200, if that is not done, and send what a reader of the body skips."""
        async with self._lock:
            # Again, for the work may have written while this one waited.
            if self.kind != "binary" and not self.finished and not (self.kind == "json" and self.has_data):
                await self._begin()
                await self._body(KEEPALIVE if self.kind == "events" else b" ", more=True)

    async def write(self, piece: bytes | bytearray) -> None:
        """Send a piece of the body; returns once the connection has room for the next."""
        async with self._lock:
            await self._begin()
            self.has_data = True
            await self._body(piece, more=True)

    async def finish(self, piece: bytes | bytearray) -> None:
        """Send the last piece."""
        async with self._lock:
            await self._begin()
            self.has_data = self.finished = True
            await self._body(piece, more=False)

    async def fail(self, error: StreamtapError) -> None:
        """Say that there is no answer, in the way that is still open.

        Raises:
            ConnectionAbortedError: a part of a body is out, and only a broken connection can say that it is not whole.
        """
        async with self._lock:
            if not self.begun:
                self.begun = True
                await send_problem(error, self._trace, self._send)
            elif self.kind == "events":
                late_problem(error, self._trace)
                await self._body(error_event(error, self._trace.request_id), more=False)
            elif not self.has_data:
                await self._body(late_problem(error, self._trace), more=False)
            else:
                late_problem(error, self._trace)
                raise ConnectionAbortedError("an answer was broken off")

    async def _begin(self) -> None:
        if not self.begun:
            self.begun = True
            headers = [*_HEADERS[self.kind], *self._more]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _body(self, piece: bytes | bytearray, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": bytes(piece), "more_body": more})
        self._last = self._clock.monotonic()
