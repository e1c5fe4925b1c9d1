"""An answer's body: made in threads, a piece at a time, one piece ahead of what is being sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass

from streamtap.engines.worker.clients import Client

# Many small pieces cost a switch of threads each; what the codec makes is larger than this.
_PIECE_BYTES = 1 << 18

JSON = "application/json"
SAFETENSORS = "application/vnd.safetensors"


@dataclass(frozen=True)
class Body:
    """An answer that is made as it is read; ``length`` in bytes, where it is known beforehand."""

    media_type: str
    pieces: Iterator[bytes]
    length: int | None = None


async def send_body(client: Client, threads: Executor, make: Callable[[], Body]) -> None:
    """Answer 200 with what ``make`` gives; it too runs in a thread, and what it raises comes before any byte is sent.

    Raises:
        ClientDisconnect: the client left; what was begun is closed.
    """
    loop = asyncio.get_running_loop()
    body, piece, last = await loop.run_in_executor(threads, _opened, make)
    length = len(piece) if last else body.length
    headers = {"content-type": body.media_type} | ({} if length is None else {"content-length": str(length)})
    await client.start(200, headers)
    while True:
        ahead = None if last else loop.run_in_executor(threads, _pulled, body.pieces)
        try:
            await client.send(piece, last=last)
        except BaseException:
            await _closed(body, ahead)
            raise
        if ahead is None:
            return
        piece, last = await ahead


async def _closed(body: Body, ahead: asyncio.Future[tuple[bytes, bool]] | None) -> None:
    """Let the iterator end where it stands, once no thread is in it."""
    if ahead is not None:
        await asyncio.wait({ahead})
        ahead.exception()
    close = getattr(body.pieces, "close", None)
    if close is not None:
        close()


def _opened(make: Callable[[], Body]) -> tuple[Body, bytes, bool]:
    body = make()
    return body, *_pulled(body.pieces)


def _pulled(pieces: Iterator[bytes]) -> tuple[bytes, bool]:
    """The next pieces as one, and whether they are the last."""
    held: list[bytes] = []
    length = 0
    for piece in pieces:
        held.append(piece)
        length += len(piece)
        if length >= _PIECE_BYTES:
            return held[0] if len(held) == 1 else b"".join(held), False
    return b"".join(held), True
