"""Which bytes of a file a request asks for: ``Range``, ``If-Range`` and ``If-None-Match`` of RFC 9110."""

from __future__ import annotations

import re
from typing import NamedTuple

_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})", re.ASCII)


class Part(NamedTuple):
    """Bytes [start, stop) of a file of ``size``; ``is_part`` where they were asked for by a range."""

    start: int
    stop: int
    size: int
    is_part: bool = True

    @property
    def is_outside(self) -> bool:
        """Whether the file has no such bytes."""
        return self.is_part and self.start >= self.stop

    @property
    def content_range(self) -> str:
        """As the header says it."""
        where = "*" if self.is_outside else f"{self.start}-{self.stop - 1}"
        return f"bytes {where}/{self.size}"


def part_of(size: int, etag: str, *, wanted: str | None, if_range: str | None) -> Part:
    """The part that ``Range`` wants of a file; the whole where it is not understood or of several parts.

    So it is where ``If-Range`` names another state of the file, a date among them.
    """
    whole = Part(0, size, size, is_part=False)
    match = _RANGE.fullmatch((wanted or "").strip())
    if match is None or (if_range is not None and if_range.strip() != etag):
        return whole
    first, last = match.groups()
    if not first:
        return Part(max(0, size - int(last)), size, size) if last else whole
    start, stop = int(first), int(last) + 1 if last else size
    return whole if last and stop <= start else Part(start, min(stop, size), size)


def is_known(etag: str, if_none_match: str | None) -> bool:
    """Whether the caller has the file as it is already."""
    told = [each.strip().removeprefix("W/") for each in (if_none_match or "").split(",")]
    return "*" in told or etag in told
