"""Requests that are none, to a real uvicorn: an application never hears of them, so our words come from before it."""

from __future__ import annotations

import asyncio
import json
import re

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from streamtap.server.surface.http_protocol import Protocol


async def _application(scope: Scope, receive: Receive, send: Send) -> None:
    size = 0
    while (message := await receive()).get("more_body"):
        size += len(message["body"])
    size += len(message.get("body", b""))
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"8")]})
    await send({"type": "http.response.body", "body": b"%08d" % size})


def _answer(request: bytes) -> tuple[bytes, bytes]:
    """Head and body of what came until the connection was closed."""

    async def main() -> bytes:
        config, state = uvicorn.Config(_application, log_config=None, lifespan="off"), ServerState()
        config.load()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Protocol(config, state, {}), "127.0.0.1", 0)
        async with server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write(request)
            got = b""
            async with asyncio.timeout(20):
                try:
                    while piece := await reader.read(65536):
                        got += piece
                except ConnectionResetError:
                    pass  # closed while there was still more to say
            writer.close()
            return got

    head, _, body = asyncio.run(main()).partition(b"\r\n\r\n")
    return head, body


CLOSE = b"Host: x\r\nConnection: close\r\n"


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"NONSENSE / HTTP/1.1\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
    ],
)
def test_what_is_no_request_is_refused_as_everything_else_is(request_bytes: bytes) -> None:
    head, body = _answer(request_bytes)

    assert head.startswith(b"HTTP/1.1 400 ")
    told = json.loads(body)
    assert told["error"]["code"] == "invalid_request"
    assert re.search(rb"x-request-id: (\S+)", head)[1].decode() == told["request_id"]  # type: ignore[index]


def test_headers_have_an_end() -> None:
    head, _body = _answer(b"GET / HTTP/1.1\r\n" + CLOSE + b"X-Long: " + b"a" * 2_000_000)

    # A connection that is closed while more comes may take its last words with it.
    assert head.startswith(b"HTTP/1.1 400 ") or not head


def test_bodies_do_not_count_as_headers() -> None:
    body = b"b" * 3_000_000

    head, told = _answer(b"POST / HTTP/1.1\r\n" + CLOSE + b"Content-Length: 3000000\r\n\r\n" + body)

    assert (head.split(b"\r\n")[0], told) == (b"HTTP/1.1 200 OK", b"03000000")


def test_a_second_request_of_a_connection_starts_anew() -> None:
    first = b"POST / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 600_000 + b"\r\nContent-Length: 1\r\n\r\nb"
    second = first.replace(b"Host: x", b"Host: x\r\nConnection: close")

    head, told = _answer(first + second)

    assert told.startswith(b"00000001HTTP/1.1 200 OK")
    assert told.endswith(b"00000001")
    assert head.startswith(b"HTTP/1.1 200 OK")
