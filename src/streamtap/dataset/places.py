"""Where datasets lie: what a reader and a writer need of a folder, an object store or the Hub.

A path is relative to the dataset, with ``/``. A source is pinned at its first use: all that is read
through it is of one version of the dataset.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

#: Told of each number of bytes that came or went.
Advance = Callable[[int], None]


def no_advance(_bytes: int) -> None:
    """Tell nobody."""


class Source(Protocol):
    """A dataset to read. Each method may be called from several threads."""

    @property
    def name(self) -> str:
        """What messages call it: ``user/name``, ``./folder``, ``s3://bucket/x``."""
        ...

    @property
    def version(self) -> str | None:
        """The Hub commit that it is pinned to; None where there are no versions."""
        ...

    def on_disk(self, path: str) -> Path | None:
        """The whole file, if it is on this machine already; nothing is asked of any server."""
        ...

    def size_bytes(self, path: str) -> int:
        """Size of a file.

        Raises:
            DatasetNotFound: no such file.
            TransferFailed: the server failed for too long, or (``AccessDenied``) refuses us.
        """
        ...

    def fetch(self, path: str, *, again: bool = False, advance: Advance = no_advance) -> Path:
        """The whole file on this machine, downloaded when it is not there; ``again`` replaces what is.

        Raises:
            DatasetNotFound: no such file.
            TransferFailed: the server failed for too long, or (``AccessDenied``) refuses us.
        """
        ...

    def read_range(self, path: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of a file, no more than these over the wire; fewer only where the file ends.

        Raises:
            DatasetNotFound: no such file.
            TransferFailed: the server failed for too long, or (``AccessDenied``) refuses us.
        """
        ...

    def read_tail(self, path: str, n_bytes: int) -> tuple[bytes, int]:
        """The last ``n_bytes`` of a file, or all of a shorter one, and the file's size.

        Raises:
            DatasetNotFound: no such file.
            TransferFailed: the server failed for too long, or (``AccessDenied``) refuses us.
        """
        ...


@dataclass(frozen=True)
class Found:
    """What a place to publish to holds already.

    ``files`` are paths and sizes in bytes, ``sums`` the SHA-256 (hex) of those of which the place knows it without
    reading.
    """

    files: Mapping[str, int]
    sums: Mapping[str, str] = field(default_factory=dict)


class Target(Protocol):
    """A place to publish to. Nothing that is put there shows before ``publish``."""

    @property
    def name(self) -> str:
        """What messages call it."""
        ...

    @property
    def url(self) -> str:
        """The address that a person opens."""
        ...

    @property
    def is_local(self) -> bool:
        """Whether what is put stays on this machine, so that putting it early sends nothing away."""
        ...

    def look(self) -> Found | None:
        """What is there, None if nothing exists under that name; writes nothing.

        Raises:
            InvalidInput: visibility that differs from the one asked for.
            TransferFailed: the server failed for too long, or (``AccessDenied``) refuses us.
        """
        ...

    def source(self) -> Source:
        """The same place, to be read; never from what an earlier version left on this machine."""
        ...

    def room(self, path: str) -> Path:
        """Where to write the file that will be ``path``; its folder exists, and it is on one disk with ``put``."""
        ...

    def put(self, path: str, file: Path, *, advance: Advance = no_advance) -> None:
        """Take a finished file, which was written to ``room(path)``; it may be gone from there afterwards.

        Raises:
            TransferFailed: the server failed for too long.
        """
        ...

    def publish(self, files: Mapping[str, Path], stale: Sequence[str], message: str) -> str:
        """Make all that was put, and these last small files, the dataset, in one step; remove ``stale`` paths in it.

        Returns the address that a person opens.

        Raises:
            TransferFailed: the server failed for too long; nothing became visible.
            DatasetExists: somebody else published there in the meantime.
        """
        ...

    def close(self) -> None:
        """Remove what was left on this machine; what was sent stays, so that the next push need not send it."""
        ...
