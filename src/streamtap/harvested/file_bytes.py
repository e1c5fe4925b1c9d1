"""The bytes of one shard file, however they are had.

::

    folder, not packed ─► HeldFile     a map of the file: what is looked at is read
    packed, or small   ─► HeldFile     fetched whole and unpacked
    any other          ─► RemoteFile   a stretch of the file is a request
"""

from __future__ import annotations

import mmap
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from streamtap.codec import decompressed
from streamtap.errors import HarvestDamaged, InvalidInput
from streamtap.harvested.folder_place import FolderPlace
from streamtap.harvested.places import Place

#: What helps against a file that is not what the manifest says; of a run that is whole, a command does nothing more.
AGAIN = "fetch it anew, or remove manifest.json and harvest again with the same command"
#: Below this a file is fetched whole: a request costs more than the bytes.
_SMALL_BYTES = 1 << 20
#: Stretches closer than this are fetched as one.
_GAP_BYTES = 1 << 17
#: What one request brings at most; longer stretches come as several, side by side.
_REQUEST_BYTES = 1 << 24
_AT_ONCE = 4

#: Bytes [start, stop) of a file.
Span = tuple[int, int]


class FileBytes(Protocol):
    """A file to read, unpacked. Several threads may read."""

    @property
    def size_bytes(self) -> int:
        """Its length."""
        ...

    @property
    def held_bytes(self) -> int:
        """How much of this process's own memory it takes."""
        ...

    def spans(self, wanted: Sequence[Span]) -> list[memoryview]:
        """The bytes of each span, in the order asked for.

        Raises:
            HarvestDamaged: the file is missing, or ends before.
        """
        ...


@dataclass(frozen=True)
class HeldFile:
    """A file whose bytes are at hand; ``where`` is its name in messages."""

    data: memoryview
    where: str
    held_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        """See ``FileBytes.size_bytes``."""
        return len(self.data)

    def spans(self, wanted: Sequence[Span]) -> list[memoryview]:
        """See ``FileBytes.spans``."""
        if any(stop > len(self.data) for _, stop in wanted):
            raise _too_short(self.where)
        return [self.data[start:stop] for start, stop in wanted]


@dataclass(frozen=True)
class RemoteFile:
    """A file of which only what is wanted is fetched."""

    place: Place
    name: str
    size_bytes: int
    held_bytes: int = 0

    def spans(self, wanted: Sequence[Span]) -> list[memoryview]:
        """See ``FileBytes.spans``; what lies close together comes in one request, what is long in several at once."""
        stretches = _stretches(wanted)
        buffers = {stretch: memoryview(bytearray(stretch[1] - stretch[0])) for stretch in stretches}
        requests = [(stretch, part) for stretch in stretches for part in _parts(stretch)]
        if len(requests) == 1:
            self._fill(buffers[requests[0][0]], *requests[0])
        elif requests:
            with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="streamtap-ranges") as pool:
                list(pool.map(lambda request: self._fill(buffers[request[0]], *request), requests))
        return list(_cut(wanted, buffers))

    def _fill(self, buffer: memoryview, stretch: Span, part: Span) -> None:
        where = f"{self.name} of {self.place.url}"
        try:
            data = self.place.get_range(self.name, *part)
        except FileNotFoundError as error:
            raise missing(where) from error
        if len(data) != part[1] - part[0]:
            raise _too_short(where)
        buffer[part[0] - stretch[0] : part[1] - stretch[0]] = data


def open_file(place: Place, name: str, size_bytes: int, *, packed: bool, most_bytes: int) -> FileBytes:
    """The file of a shard; ``size_bytes`` as it lies there, and ``most_bytes`` once it is unpacked.

    Raises:
        HarvestDamaged: it is missing, has another size, or cannot be unpacked.
        TransferFailed: the store fails.
    """
    where = f"{name} of {place.url}"
    if isinstance(place, FolderPlace):
        found = _mapped(place.path(name), size_bytes, where)
        return _unpacked(found.data, where, most_bytes) if packed else found
    if not packed and size_bytes > _SMALL_BYTES:
        return RemoteFile(place, name, size_bytes)
    data = _fetched(place, name, size_bytes, where)
    return _unpacked(data, where, most_bytes) if packed else HeldFile(data, where, len(data))


def missing(where: str) -> HarvestDamaged:
    """A file that the manifest names and that is not there."""
    return HarvestDamaged(f"{where} is missing, and the manifest names it; {AGAIN}.")


def _too_short(where: str) -> HarvestDamaged:
    return HarvestDamaged(f"{where} ends before its rows do; {AGAIN}.")


def _fetched(place: Place, name: str, size_bytes: int, where: str) -> memoryview:
    if size_bytes > _SMALL_BYTES:
        return RemoteFile(place, name, size_bytes).spans([(0, size_bytes)])[0]
    try:
        data = place.get_range(name, 0, size_bytes + 1)
    except FileNotFoundError as error:
        raise missing(where) from error
    if len(data) != size_bytes:
        raise _other_size(where, str(len(data)) if len(data) < size_bytes else "more", size_bytes)
    return memoryview(data)


def _mapped(path: Path, size_bytes: int, where: str) -> HeldFile:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size != size_bytes:
                raise _other_size(where, str(size), size_bytes)
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    except FileNotFoundError as error:
        raise missing(where) from error
    return HeldFile(memoryview(data), where)


def _other_size(where: str, size: str, expected: int) -> HarvestDamaged:
    return HarvestDamaged(f"{where} has {size} bytes, and the manifest says {expected}; {AGAIN}.")


def _unpacked(data: memoryview, where: str, most_bytes: int) -> HeldFile:
    try:
        raw = decompressed(data, where, most_bytes=most_bytes)
    except InvalidInput as error:
        raise HarvestDamaged(f"{where} cannot be unpacked; {AGAIN}.") from error
    return HeldFile(memoryview(raw), where, len(raw))


def _stretches(wanted: Sequence[Span]) -> list[Span]:
    """What to fetch so that all of ``wanted`` is there, ascending."""
    found: list[Span] = []
    for start, stop in sorted(span for span in wanted if span[1] > span[0]):
        if found and start - found[-1][1] <= _GAP_BYTES:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return found


def _parts(stretch: Span) -> Iterator[Span]:
    for start in range(*stretch, _REQUEST_BYTES):
        yield start, min(start + _REQUEST_BYTES, stretch[1])


def _cut(wanted: Sequence[Span], buffers: dict[Span, memoryview]) -> Iterator[memoryview]:
    starts = sorted(buffers)
    for start, stop in wanted:
        if stop <= start:
            yield memoryview(b"")
            continue
        first = starts[bisect_right(starts, start, key=lambda stretch: stretch[0]) - 1]
        yield buffers[first][start - first[0] : stop - first[0]]
