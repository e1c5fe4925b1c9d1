"""Bytes of a file, or of a part of it, as an answer."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from streamtap.testing.hub_server.objects import PIECE_BYTES

_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


def file_answer(request: Request, file: Path, headers: dict[str, str]) -> Response:
    """The file, the part of it that the request's ``Range`` names, or 416 where that lies outside."""
    size = file.stat().st_size
    asked = byte_range(request.headers.get("range", ""), size)
    if asked is None:
        start, stop, status = 0, size, 200
    elif asked[0] >= asked[1]:
        return Response(status_code=416, headers=headers | {"Content-Range": f"bytes */{size}"})
    else:
        (start, stop), status = asked, 206
        headers = headers | {"Content-Range": f"bytes {start}-{stop - 1}/{size}"}
    headers = headers | {"Accept-Ranges": "bytes", "Content-Length": str(stop - start)}
    if request.method == "HEAD":
        return Response(status_code=status, headers=headers)
    return StreamingResponse(_pieces(file, start, stop), status, headers, media_type="application/octet-stream")


def byte_range(header: str, size: int) -> tuple[int, int] | None:
    """Start and stop that a ``Range`` asks for; None when it asks for nothing that can be understood.

    An empty range, ``start >= stop``, is one that the file does not have.
    """
    match = _RANGE.fullmatch(header.strip())
    if not match or match.groups() == ("", ""):
        return None
    first, last = match.groups()
    if not first:
        return max(0, size - int(last)), size
    start, stop = int(first), int(last) + 1 if last else size
    return None if last and stop <= start else (start, min(stop, size))


async def _pieces(file: Path, start: int, stop: int) -> AsyncIterator[bytes]:
    with file.open("rb") as stream:
        stream.seek(start)
        while start < stop and (piece := stream.read(min(PIECE_BYTES, stop - start))):
            start += len(piece)
            yield piece
