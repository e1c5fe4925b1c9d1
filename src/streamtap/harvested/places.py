"""Where a run's files lie: the seam between a harvest and a folder, an object store, or links."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Protocol, runtime_checkable

from streamtap.errors import InvalidInput

#: A hidden name is a file that is still being written.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")


def checked_name(name: str) -> str:
    """``name``, if it is the name of a file and leads nowhere else.

    Raises:
        InvalidInput: it is none.
    """
    if not _NAME.fullmatch(name):
        raise InvalidInput(f"a file of a run is named like 'shard_00000.safetensors', without folders; got {name!r}.")
    return name


class Place(Protocol):
    """A run's files, to read; names have no folders. Each method may be called from several threads."""

    @property
    def url(self) -> str:
        """Where it is, as people name it; no secret is in it."""
        ...

    def get(self, name: str) -> bytes:
        """A whole file.

        Raises:
            FileNotFoundError: there is none.
            TransferFailed: the store fails.
        """
        ...

    def get_range(self, name: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of a file; fewer where it ends before.

        Raises:
            FileNotFoundError: there is none.
            TransferFailed: the store fails.
        """
        ...


class WritablePlace(Place, Protocol):
    """A run's files, to write; what is put is whole or not there."""

    def size(self, name: str) -> int | None:
        """Bytes of a file, None where there is none."""
        ...

    def names(self) -> set[str]:
        """The files that are there."""
        ...

    def check(self) -> None:
        """Look, before much work is done for it, whether the place takes files; none is made.

        Raises:
            InvalidInput: it takes none.
            TransferFailed: the store cannot be reached.
        """
        ...

    def put(self, name: str, data: bytes) -> None:
        """Write a small file, in place of any of that name.

        Raises:
            NotEnoughSpace: the disk is full.
            TransferFailed: the store fails for longer than it was given.
        """
        ...

    def put_file(self, name: str, file: Path, *, sha256: str) -> None:
        """Take a finished file that lies on this machine; ``file`` may be gone afterwards.

        Raises:
            NotEnoughSpace: the disk is full.
            TransferFailed: the store fails for longer than it was given; the file is still there then.
        """
        ...

    def delete(self, name: str) -> None:
        """Remove a file if it is there."""
        ...


@runtime_checkable
class Patient(Protocol):
    """A place that waits for a store which fails."""

    def interrupt(self) -> None:
        """Wait no longer, for good: what is under way raises ``TransferFailed`` soon."""
        ...
