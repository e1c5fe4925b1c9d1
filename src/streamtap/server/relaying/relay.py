"""Passes an engine's JSON answer on as it comes, without holding it, and lets nothing out that is not whole.

::

    head (held until usage and the first shape are known and right) ─► pieces, one behind ─► the last, after the ledger
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

from streamtap.completion import Usage
from streamtap.errors import EngineDead, EngineFailed
from streamtap.server.relaying.expected_rows import ExpectedRows
from streamtap.server.relaying.small_answer import Seen, read_small
from streamtap.server.relaying.upstream import read_said
from streamtap.server.surface.reply import Reply
from streamtap.wire.scan import BodyScanner

#: Most of a body that is held back to know more of it before the client hears anything.
HEAD_BYTES = 256 * 1024
#: A body up to this size is read when it is whole; a larger one on its way.
_SMALL_BYTES = 32 * 1024


async def relay_json(
    pieces: AsyncIterator[bytes],
    reply: Reply,
    *,
    expected: ExpectedRows | None,
    ran: Callable[[Usage, int], None],
    settle: Callable[[Usage], Awaitable[None]],
) -> None:
    """Pass ``pieces`` on to the client; ``settle`` is called before the last of them, ``ran`` with each one's size.

    Raises:
        CaptureMissed: a capture that is not whole.
        EngineDead: the answer ended early.
        EngineFailed: it is none, or does not say what was used.
    """
    held, scanner = bytearray(), None
    async for piece in pieces:
        if scanner is None and len(held) + len(piece) <= _SMALL_BYTES:
            held += piece
            continue
        if scanner is None:
            scanner = BodyScanner()
            scanner.feed(bytes(held))
        scanner.feed(piece)
        _check(scanner, expected)
        if scanner.usage is not None:
            ran(scanner.usage, len(piece))
        # One piece stays behind: an answer that is found wrong at its end must not look whole.
        if held and (reply.has_data or _is_known(scanner, expected) or len(held) + len(piece) > HEAD_BYTES):
            await reply.write(held)
            held = bytearray()
        held += piece
    seen = scanner or read_small(held)
    usage = _whole(seen, expected)
    if scanner is None:
        ran(usage, len(held))
    await settle(usage)
    await reply.finish(held)


def _is_known(seen: Seen, expected: ExpectedRows | None) -> bool:
    return seen.usage is not None and (expected is None or bool(seen.shapes))


def _check(seen: Seen, expected: ExpectedRows | None) -> None:
    if seen.error is not None:
        raise read_said({"error": seen.error}, 500)
    if seen.broken:
        raise EngineFailed("the model's engine sent an answer that is not JSON; send the request again.")
    if expected is not None:
        expected.so_far(seen.shapes, seen.usage)


def _whole(seen: Seen, expected: ExpectedRows | None) -> Usage:
    _check(seen, expected)
    if not seen.complete:
        raise EngineDead("the model's engine ended in the middle of its answer; send the request again.")
    if expected is not None:
        expected.whole(seen.shapes, seen.usage)
        expected.layers([envelope.layer_indices for envelope in seen.envelopes])
    if seen.usage is None:
        raise EngineFailed("the model's engine sent an answer without usage; send the request again.")
    return seen.usage
