"""The other end of one HTTP request: its body, whether it is still there, and what it is sent."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from streamtap.engines.worker.statuses import status_of
from streamtap.errors import RequestTooLarge, StreamtapError
from streamtap.wire.errors import error_body

#: The gateway takes 50 MiB; what it passes on may be a little more, as it says some things in other words.
_MOST_BODY_BYTES = 64 * 1024 * 1024
_REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")

T = TypeVar("T")


def request_id_of(headers: Headers) -> str:
    """The id that came with the request, or a new one."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


class Client:
    """Whoever asked. Each method that waits ends with ``ClientDisconnect`` once it has left."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.headers = Headers(scope=scope)
        self.request_id = request_id_of(self.headers)
        self.status: int | None = None
        self.sent_bytes = 0
        self._receive, self._send = receive, send
        self._gone: asyncio.Task[None] | None = None

    async def body(self) -> bytes:
        """The whole body; from now on it is noticed when the client leaves.

        Raises:
            RequestTooLarge: it is larger than the gateway passes on.
        """
        parts: list[bytes] = []
        length, more = 0, True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            parts.append(message.get("body", b""))
            length += len(parts[-1])
            if length > _MOST_BODY_BYTES:
                raise RequestTooLarge(f"the body has more than {_MOST_BODY_BYTES} bytes; send fewer prompts.")
            more = message.get("more_body", False)
        self._gone = asyncio.create_task(self._until_gone())
        return b"".join(parts)

    async def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """What ``work`` gives."""
        task = asyncio.create_task(work)
        await self._either(task, None)
        return task.result()

    async def wait_for(self, work: Coroutine[Any, Any, T], seconds: float) -> T | None:
        """What ``work`` gives, or None where it takes longer; then it is given up."""
        task = asyncio.create_task(work)
        await self._either(task, seconds)
        return task.result() if task.done() and not task.cancelled() else None

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Send status and headers."""
        told = {"x-request-id": self.request_id, **headers}
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in told.items()]
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def send(self, piece: bytes, *, last: bool) -> None:
        """Send a piece of the body; waits while the client is slow to take what was sent before."""
        self._check_there()
        await self._send({"type": "http.response.body", "body": piece, "more_body": not last})
        self.sent_bytes += len(piece)

    async def refuse(self, error: StreamtapError) -> None:
        """Answer with ``error`` alone."""
        body = error_body(error, self.request_id)
        headers = {"content-type": "application/json", "content-length": str(len(body))}
        if error.retry_after_seconds is not None:
            headers["retry-after"] = str(error.retry_after_seconds)
        await self.start(status_of(error), headers)
        await self.send(body, last=True)

    def leave(self) -> None:
        """Watch no longer."""
        gone, self._gone = self._gone, None
        if gone is not None:
            # Its end holds this client, so that to hold it too would keep both until the collector comes by.
            gone.cancel()

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _either(self, task: asyncio.Task[Any], seconds: float | None) -> None:
        """Wait for ``task``, as long as the client is there; one that is not done in time is cancelled."""
        others = set() if self._gone is None else {self._gone}
        try:
            await asyncio.wait({task, *others}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            self._check_there()
        finally:
            task.cancel()

    def _check_there(self) -> None:
        if self._gone is not None and self._gone.done():
            raise ClientDisconnect
