"""HTTP to engines, as thin as can be: a request and its answer pass here for every completion.

A general client spends a millisecond on each request; this one knows a POST, a GET and nothing else.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import urlsplit

import httptools

from streamtap.errors import EngineDead, EngineUnreachable

_CONNECT_SECONDS = 5.0
#: Shorter than a worker keeps a silent connection, or the next request may meet one that is just closing.
_IDLE_SECONDS = 3.0
#: An engine that closes an idle connection does so at once; one that took longer was at work on the request.
_RACE_SECONDS = 1.0
#: What may lie here unread before the engine is made to wait.
_HIGH_BYTES = 256 * 1024
#: Statuses below it announce an answer that is still to come.
_FINAL = 200
#: An answer with none of these ends with its connection.
_LENGTHS = {"content-length", "transfer-encoding"}


@dataclass(frozen=True)
class Address:
    """Where one thing is asked for, completions by default."""

    host: str
    port: int
    is_tls: bool
    lead: bytes

    def head(self, headers: Mapping[str, str], length: int) -> bytes:
        """The request up to its body."""
        told = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return self.lead + f"{told}Content-Length: {length}\r\n\r\n".encode("latin-1")


@lru_cache(maxsize=256)
def address_of(base_url: str, method: str = "POST", path: str = "/v1/completions") -> Address:
    """The address of ``path`` below an engine's own, which has ``/v1`` at its end or not."""
    parts = urlsplit(base_url.rstrip("/"))
    target = parts.path.removesuffix("/v1") + path
    lead = f"{method} {target} HTTP/1.1\r\nHost: {parts.netloc.rpartition('@')[2]}\r\n".encode("latin-1")
    is_tls = parts.scheme == "https"
    return Address(parts.hostname or "", parts.port or (443 if is_tls else 80), is_tls, lead)


class EngineConnections:
    """Connections to engines, kept for a few seconds for the next request."""

    def __init__(self) -> None:
        self._idle: dict[Address, deque[_Connection]] = {}

    async def post(self, address: Address, headers: Mapping[str, str], body: bytes) -> EngineResponse:
        """Send ``body``; what comes back has its status and headers, its body is still to be read.

        Raises:
            EngineUnreachable: nobody answers at that address.
            EngineDead: the connection broke before an answer.
        """
        kept = self._kept(address)
        connection = kept or await self._opened(address)
        began = time.monotonic()
        try:
            await connection.ask(address.head(headers, len(body)), body)
        except EngineDead:
            is_race = connection is kept and not connection.heard and time.monotonic() - began < _RACE_SECONDS
            if not is_race:
                raise
            connection = await self._asked_anew(address, headers, body)
        return EngineResponse(self, address, connection)

    def keep(self, address: Address, connection: _Connection) -> None:
        """Take back a connection whose answer was read to its end."""
        connection.idle_since = time.monotonic()
        self._idle.setdefault(address, deque()).append(connection)

    def close(self) -> None:
        """Close those that nobody uses."""
        for connections in self._idle.values():
            for connection in connections:
                connection.abort()
        self._idle.clear()

    def _kept(self, address: Address) -> _Connection | None:
        idle = self._idle.get(address)
        while idle:
            connection = idle.pop()
            if not connection.is_closed and time.monotonic() - connection.idle_since < _IDLE_SECONDS:
                connection.begin()
                return connection
            connection.abort()
        return None

    async def _asked_anew(self, address: Address, headers: Mapping[str, str], body: bytes) -> _Connection:
        """After the engine closed an idle connection at the very moment that it was used again."""
        try:
            connection = await self._opened(address)
        except EngineUnreachable as error:
            raise dead() from error
        await connection.ask(address.head(headers, len(body)), body)
        return connection

    async def _opened(self, address: Address) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                _, connection = await loop.create_connection(
                    _Connection, address.host, address.port, ssl=_tls() if address.is_tls else None
                )
        except OSError as error:
            raise EngineUnreachable("the model's engine does not answer; try again in a moment.") from error
        return connection


class EngineResponse:
    """One answer; it has to be closed, and closing it before its end stops the engine's work."""

    def __init__(self, connections: EngineConnections, address: Address, connection: _Connection) -> None:
        self._connections = connections
        self._address = address
        self._connection = connection

    @property
    def status_code(self) -> int:
        """The status."""
        return self._connection.status

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers, names in small letters."""
        return self._connection.headers

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The body's bytes as they come; the engine waits for whoever reads slowly.

        Raises:
            EngineDead: the connection broke before the body's end.
        """
        while (piece := await self._connection.next_piece()) is not None:
            yield piece

    def close(self) -> None:
        """Let the connection go: to the next request, or to its end where the body was not read."""
        if self._connection.is_done:
            self._connections.keep(self._address, self._connection)
        else:
            self._connection.abort()


class _Connection(asyncio.Protocol):
    """One connection; the parser calls the ``on_`` methods."""

    def __init__(self) -> None:
        self.idle_since = 0.0
        self.is_closed = False
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._paused = False
        self.begin()

    def begin(self) -> None:
        """Forget the answer before."""
        self._parser = httptools.HttpResponseParser(self)
        self.headers: dict[str, str] = {}
        self.status = 0
        self._pieces: deque[bytes] = deque()
        self._held_bytes = 0
        self.heard = self._broken = False
        self._has_headers = self._complete = self._may_stay = False

    @property
    def is_done(self) -> bool:
        """Whether the answer was read to its end and another may follow."""
        return self._complete and self._may_stay and not self._pieces and not self.is_closed

    async def ask(self, head: bytes, body: bytes) -> None:
        """Send a request and wait for the headers of its answer; it is closed where none come."""
        try:
            if self._transport is not None:
                self._transport.writelines((head, body))
            while not self._has_headers:
                await self._something()
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        self.is_closed = True
        if self._transport is not None:
            self._transport.abort()

    async def next_piece(self) -> bytes | None:
        """The next bytes of the body, None after the last."""
        while not self._pieces:
            if self._complete:
                return None
            await self._something()
        whole = self._pieces.popleft() if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._held_bytes = 0
        if self._paused and self._transport is not None and not self.is_closed:
            self._paused = False
            self._transport.resume_reading()
        return whole

    async def _something(self) -> None:
        if self.is_closed:
            raise dead()
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if isinstance(transport, asyncio.Transport):
            self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True
        if exc is None and self._has_headers and not _LENGTHS & self.headers.keys() and not self._broken:
            # Only this ends it; whoever reads the body sees whether that is whole.
            self._complete = True
        self._wake()

    def data_received(self, data: bytes) -> None:
        self.heard = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._broken = True
            # What is not HTTP cannot be told from an engine that breaks off.
            self.abort()
        if self._held_bytes > _HIGH_BYTES and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._has_headers = self.status >= _FINAL

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)
        self._held_bytes += len(body)

    def on_message_complete(self) -> None:
        if self.status < _FINAL:
            self.headers.clear()
            return
        self._may_stay = self._parser.should_keep_alive()
        self._complete = True


def dead() -> EngineDead:
    """Why an answer does not go on."""
    return EngineDead(
        "the model's engine ended in the middle of the request; it is being started again, try once more."
    )


@lru_cache(maxsize=1)
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()
