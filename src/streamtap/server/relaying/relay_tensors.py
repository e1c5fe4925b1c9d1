"""Passes an engine's safetensors answer on: its header, held and checked whole, then the tensors' bytes."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from streamtap.completion import Usage
from streamtap.errors import BadJson, EngineDead, EngineFailed
from streamtap.server.relaying.expected_rows import ExpectedRows, Shape
from streamtap.server.surface.reply import Reply
from streamtap.wire.reading import read_json

_LENGTH_BYTES = 8
#: The format's own limit.
_MOST_HEADER_BYTES = 100_000_000
_CAPTURE = re.compile(r"residual_stream(?:\.(\d+))?")


async def relay_tensors(
    pieces: AsyncIterator[bytes],
    reply: Reply,
    *,
    expected: ExpectedRows,
    ran: Callable[[Usage, int], None],
    settle: Callable[[Usage], Awaitable[None]],
) -> None:
    """Pass ``pieces`` on to the client; ``settle`` is called before the last of them, ``ran`` with each one's size.

    Raises:
        CaptureMissed: a capture that is not whole.
        EngineDead: the answer ended early.
        EngineFailed: it is not a safetensors file of a completion.
    """
    held, header_bytes = await _head(pieces)
    header = _parsed(held[_LENGTH_BYTES:header_bytes])
    usage = _usage(header)
    expected.whole(_shapes(header), usage)
    length = header_bytes + max((_end(tensor) for name, tensor in header.items() if name != "__metadata__"), default=0)
    reply.add_header(b"content-length", str(length).encode())
    got = len(held)
    ran(usage, got)
    async for piece in pieces:
        got += len(piece)
        ran(usage, len(piece))
        await reply.write(held)
        held = piece
    if got != length:
        raise EngineDead("the model's engine ended in the middle of its answer; send the request again.")
    await settle(usage)
    await reply.finish(held)


async def _head(pieces: AsyncIterator[bytes]) -> tuple[bytes, int]:
    """What came until the header was whole, and how many of its bytes come before the first tensor."""
    held = bytearray()
    async for piece in pieces:
        held += piece
        if len(held) < _LENGTH_BYTES:
            continue
        until = _LENGTH_BYTES + int.from_bytes(held[:_LENGTH_BYTES], "little")
        if until > _MOST_HEADER_BYTES:
            raise _unreadable()
        if len(held) >= until:
            return bytes(held), until
    raise EngineDead("the model's engine ended in the middle of its answer; send the request again.")


def _parsed(raw: bytes) -> dict[str, Any]:
    try:
        header = read_json(raw)
    except BadJson as error:
        raise _unreadable() from error
    if not isinstance(header, dict):
        raise _unreadable()
    return header


def _usage(header: Mapping[str, Any]) -> Usage:
    try:
        told = read_json(header["__metadata__"]["completion"])["usage"]
        return Usage(int(told["prompt_tokens"]), int(told["completion_tokens"]))
    except (LookupError, TypeError, ValueError) as error:
        raise _unreadable() from error


def _shapes(header: Mapping[str, Any]) -> list[Shape]:
    """Shapes of the captures, in the order of their choices."""
    found: list[tuple[int, Shape]] = []
    for name, tensor in header.items():
        if match := _CAPTURE.fullmatch(name):
            shape = tuple(tensor["shape"]) if isinstance(tensor, dict) and "shape" in tensor else ()
            if len(shape) != 3:
                raise _unreadable()
            found.append((int(match[1] or 0), shape))
    return [shape for _, shape in sorted(found)]


def _end(tensor: Any) -> int:
    try:
        return int(tensor["data_offsets"][1])
    except (LookupError, TypeError, ValueError) as error:
        raise _unreadable() from error


def _unreadable() -> EngineFailed:
    return EngineFailed("the model's engine sent a binary answer that is not a completion; send the request again.")
