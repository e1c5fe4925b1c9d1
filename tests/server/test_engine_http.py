"""The client of engines, against a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

import pytest

from streamtap.errors import EngineDead, EngineUnreachable
from streamtap.server.relaying.engine_http import EngineConnections, EngineResponse, address_of
from streamtap.testing.stub_engine import BREAK, Script, StubEngine


def _with(script: Script, act: Callable[[EngineConnections, StubEngine], Coroutine[None, None, None]]) -> None:
    with StubEngine(lambda _body: script) as engine:

        async def main() -> None:
            connections = EngineConnections()
            await act(connections, engine)
            connections.close()

        asyncio.run(main())


async def _post(connections: EngineConnections, engine: StubEngine) -> EngineResponse:
    return await connections.post(address_of(engine.base_url), {"X-One": "1"}, b'{"a": 1}')


def test_an_answer_in_pieces_and_the_connection_again() -> None:
    async def act(connections: EngineConnections, engine: StubEngine) -> None:
        for _ in range(3):
            response = await _post(connections, engine)
            assert (response.status_code, response.headers["content-type"]) == (200, "application/json")
            assert b"".join([piece async for piece in response.chunks()]) == b"ab" * 100_000
            response.close()
            assert sum(map(len, connections._idle.values())) == 1
        assert engine.bodies == [{"a": 1}] * 3
        assert engine.headers[0]["x-one"] == "1"

    _with(Script([b"a", b"ba" * 99_999, b"b"]), act)


def test_a_body_that_is_not_read_ends_the_connection_and_the_work() -> None:
    async def act(connections: EngineConnections, engine: StubEngine) -> None:
        response = await _post(connections, engine)
        async for _piece in response.chunks():
            break
        response.close()
        assert not connections._idle
        async with asyncio.timeout(10):
            while not engine.left:
                await asyncio.sleep(0.01)

    _with(Script([b"a", 30.0, b"b"]), act)


def test_a_request_that_is_given_up_ends_the_connection_and_the_work() -> None:
    async def act(connections: EngineConnections, engine: StubEngine) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await _post(connections, engine)
        async with asyncio.timeout(10):
            while not engine.left:
                await asyncio.sleep(0.01)

    _with(Script([30.0, b"a"]), act)


def test_a_connection_that_breaks() -> None:
    async def act(connections: EngineConnections, engine: StubEngine) -> None:
        response = await _post(connections, engine)
        with pytest.raises(EngineDead):
            _ = [piece async for piece in response.chunks()]
        response.close()
        assert not connections._idle

    _with(Script([b"a", 0.05, BREAK]), act)


def test_something_that_is_not_http_and_nobody_at_all() -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example ESMTP\r\n")
        await writer.drain()
        writer.close()

    async def main() -> None:
        connections = EngineConnections()
        server = await asyncio.start_server(greet, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(EngineDead):
            await connections.post(address_of(f"http://127.0.0.1:{port}"), {}, b"{}")
        server.close()
        with pytest.raises(EngineUnreachable):
            await connections.post(address_of("http://127.0.0.1:9"), {}, b"{}")

    asyncio.run(main())


_OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
_CUT = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"


def _against(
    *connections: list[bytes | float], act: Callable[[EngineConnections, str], Coroutine[None, None, None]]
) -> int:
    """Run ``act``; a connection answers its requests one by one, waits where a number stands, then closes.

    The return value is how many requests came.
    """
    left, asked = list(connections), []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in left.pop(0):
            if isinstance(answer, float):
                await asyncio.sleep(answer)
                continue
            await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(2)
            asked.append(answer)
            writer.write(answer)
        await writer.drain()
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = EngineConnections()
        await act(client, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        client.close()
        server.close()

    asyncio.run(asyncio.wait_for(main(), 20))
    return len(asked)


async def _body(client: EngineConnections, url: str) -> bytes:
    response = await client.post(address_of(url), {}, b"{}")
    try:
        assert response.status_code == 200
        return b"".join([piece async for piece in response.chunks()])
    finally:
        response.close()


def test_a_kept_connection_that_closes_without_a_word_is_tried_once_more() -> None:
    async def act(client: EngineConnections, url: str) -> None:
        assert await _body(client, url) == b"{}"
        assert await _body(client, url) == b"{}"

    assert _against([_OK, b""], [_OK], act=act) == 3


@pytest.mark.parametrize(
    ("connections", "requests"),
    [
        pytest.param([[b""], [_OK]], 1, id="a new connection"),
        pytest.param([[_OK, b"HTTP/1.1 2"], [_OK]], 2, id="something was said"),
        pytest.param([[_OK, b"", 1.1], [_OK]], 2, id="it was at work"),
        pytest.param([[_OK, b""], [b""], [_OK]], 3, id="twice in a row"),
    ],
)
def test_whatever_may_have_been_begun_is_not_asked_again(connections: list[list[bytes | float]], requests: int) -> None:
    async def ask_twice(client: EngineConnections, url: str) -> None:
        await _body(client, url)
        await _body(client, url)

    async def act(client: EngineConnections, url: str) -> None:
        with pytest.raises(EngineDead):
            await ask_twice(client, url)
        assert not any(client._idle.values())

    assert _against(*connections, act=act) == requests


@pytest.mark.parametrize("head", [_CUT, b"HTTP/1.0 200 OK\r\n\r\n"])
def test_an_answer_without_a_length_ends_with_its_connection(head: bytes) -> None:
    async def act(client: EngineConnections, url: str) -> None:
        assert await _body(client, url) == b'{"a": 1}'
        assert not client._idle

    _against([head + b'{"a": 1}'], act=act)


@pytest.mark.parametrize("length", [b"Content-Length: 9", b"Transfer-Encoding: chunked"])
def test_an_answer_with_a_length_does_not(length: bytes) -> None:
    async def act(client: EngineConnections, url: str) -> None:
        with pytest.raises(EngineDead):
            await _body(client, url)

    _against([b"HTTP/1.1 200 OK\r\n" + length + b"\r\n\r\n4\r\n{"], act=act)


def test_announcements_before_the_answer_are_skipped() -> None:
    hints = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\nTransfer-Encoding: chunked\r\n\r\n"

    async def act(client: EngineConnections, url: str) -> None:
        response = await client.post(address_of(url), {}, b"{}")
        assert response.headers == {"content-length": "2"}
        assert b"".join([piece async for piece in response.chunks()]) == b"{}"
        response.close()
        assert await _body(client, url) == b"{}"
        with pytest.raises(EngineDead):
            await _body(client, url)

    assert (
        _against([hints + _OK, _OK, b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"], act=act)
        == 3
    )


def test_addresses() -> None:
    assert address_of("http://h:81/v1/") == address_of("http://h:81")
    assert address_of("https://user:secret@h/engines/a").lead == (
        b"POST /engines/a/v1/completions HTTP/1.1\r\nHost: h\r\n"
    )
    assert address_of("https://h").port == 443


def test_other_addresses_of_an_engine() -> None:
    for base in ("http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"):
        assert address_of(base).lead.startswith(b"POST /v1/completions HTTP/1.1\r\nHost: h:1\r\n")
        assert address_of(base, "GET", "/metrics").lead.startswith(b"GET /metrics HTTP/1.1\r\nHost: h:1\r\n")
    assert address_of("https://h/far/v1", "GET", "/v1/models").lead.startswith(b"GET /far/v1/models HTTP/1.1\r\n")
