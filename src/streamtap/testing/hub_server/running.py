"""An application on two ports of this machine, in a thread of its own."""

from __future__ import annotations

import asyncio
import socket
import threading
from dataclasses import dataclass

import uvicorn
from starlette.types import ASGIApp

from streamtap.errors import InvalidInput, StreamtapError

HOST = "127.0.0.1"
#: How long a request may take to end once the server stops, in seconds.
_GRACE_SECONDS = 1


class _Server(uvicorn.Server):
    """Ends when it is told to, where uvicorn's own looks ten times a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.answers = threading.Event()
        self._ended = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def main_loop(self) -> None:
        """Answer until the end."""
        self._loop = asyncio.get_running_loop()
        self.answers.set()
        await self._ended.wait()

    def end(self) -> None:
        """Let the loop end, from another thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._ended.set)


@dataclass(frozen=True)
class Running:
    """A server that answers; ``stop`` ends its thread and closes its sockets."""

    server: _Server
    thread: threading.Thread

    def stop(self) -> None:
        """Answer what is being answered, then end."""
        self.server.end()
        self.thread.join()


def listen(port: int) -> socket.socket:
    """A socket of this machine alone; port 0 takes a free one.

    Raises:
        InvalidInput: the port is in use or not allowed.
    """
    # Named as TCP, or asyncio leaves Nagle's algorithm on and each small answer takes 40 ms.
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((HOST, port))
        listening.listen()
        return listening
    except (OSError, OverflowError) as error:
        listening.close()
        raise InvalidInput(f"port {port} of {HOST} cannot be used ({error}); choose another, or 0 for any.") from error


def address(listening: socket.socket) -> str:
    """The origin that leads to the socket."""
    return f"http://{HOST}:{listening.getsockname()[1]}"


def run(app: ASGIApp, sockets: list[socket.socket]) -> Running:
    """Serve ``app`` on the sockets until it is stopped.

    Raises:
        StreamtapError: it ended before it could answer.
    """
    config = uvicorn.Config(
        app,
        loop="asyncio",
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        date_header=False,
        timeout_graceful_shutdown=_GRACE_SECONDS,
    )
    server = _Server(config)
    thread = threading.Thread(
        target=lambda: asyncio.run(server.serve(sockets=sockets)), name="streamtap-hub", daemon=True
    )
    thread.start()
    while not server.answers.wait(0.05) and thread.is_alive():
        pass
    if not server.answers.is_set():
        raise StreamtapError("the local Hub did not start; what its thread printed says why.")
    return Running(server, thread)
