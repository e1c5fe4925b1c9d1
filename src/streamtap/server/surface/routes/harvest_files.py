"""GET /v1/harvest/files/{run_id}/{name}: a file of a run, to whoever has a signed link; plain ASGI, piece by piece."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from streamtap.errors import InvalidInput, NotFound, StreamtapError
from streamtap.server.clock import Clock
from streamtap.server.harvests.signing import FolderLinks, Links
from streamtap.server.stopping import Stopping
from streamtap.server.surface.byte_ranges import Part, is_known, part_of
from streamtap.server.surface.problems import problem
from streamtap.server.surface.trace import trace_of

_PIECE_BYTES = 1024 * 1024
_JSON, _BYTES = "application/json", "application/octet-stream"


class HarvestFiles:
    """The endpoint as an ASGI application; with runs in an object store there is nothing here."""

    def __init__(self, links: Links, *, clock: Clock, stopping: Stopping) -> None:
        self._links = links
        self._clock = clock
        self._stopping = stopping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = Request(scope)
        path = await run_in_threadpool(self._path, request)
        fd = await run_in_threadpool(_opened, path)
        try:
            await self._answer(request, fd, receive, send)
        finally:
            os.close(fd)

    def _path(self, request: Request) -> Path:
        if not isinstance(self._links, FolderLinks):
            raise NotFound("files of runs lie in an object store, whose own links GET /v1/harvest/{job_id} gives.")
        asked = {name: request.query_params.get(name, "") for name in ("expires", "signature")}
        where = request.path_params
        return self._links.opened(where["run_id"], where["name"], now=self._clock.now(), **asked)

    async def _answer(self, request: Request, fd: int, receive: Receive, send: Send) -> None:
        about, told = os.fstat(fd), request.headers
        # A file of a run is never written twice, but a run may be made again under the same name.
        etag = f'"{about.st_mtime_ns:x}-{about.st_size:x}"'
        headers = {"accept-ranges": "bytes", "etag": etag}
        if is_known(etag, told.get("if-none-match")):
            await _send(send, 304, headers)
            return
        part = part_of(about.st_size, etag, wanted=told.get("range"), if_range=told.get("if-range"))
        if part.is_part:
            headers["content-range"] = part.content_range
        if part.is_outside:
            await self._refuse(request, part, headers, send)
            return
        headers["content-length"] = str(part.stop - part.start)
        headers["content-type"] = _JSON if request.path_params["name"].endswith(".json") else _BYTES
        await _begin(send, 206 if part.is_part else 200, headers)
        if request.method == "HEAD":
            await send({"type": "http.response.body", "body": b""})
            return
        await self._stream(fd, part, receive, send)

    async def _refuse(self, request: Request, part: Part, headers: dict[str, str], send: Send) -> None:
        error = InvalidInput(f"the file has {part.size} bytes; the range asks for none of them.")
        _, more, body = problem(error, trace_of(request.scope))
        await _send(send, 416, {**headers, **{name.decode(): value.decode() for name, value in more}}, body)

    async def _stream(self, fd: int, part: Part, receive: Receive, send: Send) -> None:
        """Send the bytes as fast as they are taken; a piece is all that is held.

        Raises:
            ClientDisconnect: the client left.
            ConnectionAbortedError: the file is not as long as it was, or the server stops.
        """
        start = part.start
        with _watched(receive) as gone, _told(self._stopping) as told:
            while start < part.stop:
                piece = await run_in_threadpool(os.pread, fd, min(_PIECE_BYTES, part.stop - start), start)
                if gone.done():
                    raise ClientDisconnect
                if told or not piece:
                    raise ConnectionAbortedError("a file was broken off")
                start += len(piece)
                await send({"type": "http.response.body", "body": piece, "more_body": start < part.stop})
        if part.start == part.stop:
            await send({"type": "http.response.body", "body": b""})


def _opened(path: Path) -> int:
    """The open file.

    Raises:
        NotFound: it is not there any more.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise _gone() from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _gone()
    return fd


def _gone() -> NotFound:
    return NotFound("this file is not there any more: runs are removed some time after they are done. Submit it again.")


@contextmanager
def _watched(receive: Receive) -> Iterator[asyncio.Future[None]]:
    """A future that is done once the client has left."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    watching = asyncio.ensure_future(watch())
    try:
        yield watching
    finally:
        watching.cancel()


@contextmanager
def _told(stopping: Stopping) -> Iterator[list[StreamtapError]]:
    """A list that the server puts its reason into when nothing may run any longer."""
    reasons: list[StreamtapError] = []
    with stopping.interruptible(reasons.append):
        yield reasons


async def _begin(send: Send, status: int, headers: dict[str, str]) -> None:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})


async def _send(send: Send, status: int, headers: dict[str, str], body: bytes = b"") -> None:
    await _begin(send, status, headers)
    await send({"type": "http.response.body", "body": body})
