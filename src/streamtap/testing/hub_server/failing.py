"""The layer that lets requests fail as a test asked for."""

from __future__ import annotations

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from streamtap.testing.hub_server.faults import Fault, Faults

_MESSAGES = {412: "another commit was made since", 429: "too many requests"}


class Failing:
    """Between what counts and what answers."""

    def __init__(self, app: ASGIApp, faults: Faults) -> None:
        self._app = app
        self._faults = faults

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or let it fail."""
        line = f"{scope['method']} {scope['path']}"
        if fault := self._faults.take("fail", line):
            await _drain(receive)
            await _failure(fault)(scope, receive, send)
        elif scope["method"] in ("PUT", "POST") and (fault := self._cut_of_upload(scope, line)):
            await _CutUpload(scope, receive, fault.after_bytes).serve(self._app)
        else:
            await _Answer(self._faults, line, scope, receive, send).serve(self._app)

    def _cut_of_upload(self, scope: Scope, line: str) -> Fault | None:
        length = dict(scope["headers"]).get(b"content-length")
        return self._faults.take("cut", line, lambda fault: length is None or int(length) > fault.after_bytes)


class _CutUpload:
    """A request that is read for so many bytes, and then nobody is there any more."""

    def __init__(self, scope: Scope, receive: Receive, after_bytes: int) -> None:
        self._scope = scope
        self._receive = receive
        self._left = after_bytes

    async def serve(self, app: ASGIApp) -> None:
        await app(self._scope, self._until_cut, _nowhere)
        self._scope["hang_up"]()
        await _until_gone(self._receive)

    async def _until_cut(self) -> Message:
        if self._left <= 0:
            return {"type": "http.disconnect"}
        message = await self._receive()
        self._left -= len(message.get("body", b""))
        return message if self._left > 0 else {"type": "http.disconnect"}


class _Answer:
    """An answer whose body may be cut or changed on its way."""

    def __init__(self, faults: Faults, line: str, scope: Scope, receive: Receive, send: Send) -> None:
        self._faults = faults
        self._line = line
        self._scope = scope
        self._receive = receive
        self._send = send
        self._sent = 0
        self._cut_at: int | None = None
        self._flip_at: int | None = None
        self._is_cut = False

    async def serve(self, app: ASGIApp) -> None:
        await app(self._scope, self._receive, self._pass)
        if self._is_cut:
            await _until_gone(self._receive)

    async def _pass(self, message: Message) -> None:
        if self._is_cut:
            return
        if message["type"] == "http.response.start":
            self._choose(message)
            await (self._hang_up() if self._is_cut else self._send(message))
        else:
            await self._pass_body(message, message.get("body", b""))

    def _choose(self, start: Message) -> None:
        if self._faults.take("lose", self._line):
            self._is_cut = True
            return
        length = int(dict(start["headers"]).get(b"content-length", b"0"))
        if self._scope["method"] == "HEAD" or start["status"] not in (200, 206) or not length:
            return
        if fault := self._faults.take("cut", self._line, lambda fault: length > fault.after_bytes):
            self._cut_at = fault.after_bytes
        if self._faults.take("corrupt", self._line):
            self._flip_at = length // 2

    async def _pass_body(self, message: Message, body: bytes) -> None:
        if self._flip_at is not None and 0 <= (place := self._flip_at - self._sent) < len(body):
            body = body[:place] + bytes([body[place] ^ 0xFF]) + body[place + 1 :]
        if self._cut_at is not None and self._sent + len(body) > self._cut_at:
            self._is_cut = True
            await self._send({**message, "body": body[: self._cut_at - self._sent], "more_body": True})
            await self._hang_up()
            return
        self._sent += len(body)
        await self._send({**message, "body": body})

    async def _hang_up(self) -> None:
        self._scope["hang_up"]()


def _failure(fault: Fault) -> JSONResponse:
    message = _MESSAGES.get(fault.status, "this was asked to fail")
    headers = {"X-Error-Message": message}
    if fault.retry_after is not None:
        headers["Retry-After"] = str(fault.retry_after)
    return JSONResponse({"error": message}, fault.status, headers)


async def _drain(receive: Receive) -> None:
    # An answer before the body has come would reach a client that is still sending as a broken connection.
    while (message := await receive())["type"] == "http.request" and message.get("more_body"):
        pass


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _nowhere(message: Message) -> None:
    """What is sent to nobody."""
