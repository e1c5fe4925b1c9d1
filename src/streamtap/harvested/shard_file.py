"""A shard file that is being written: every tensor's place is known beforehand, so rows may come in any order."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamtap.errors import InvalidInput, NotEnoughSpace
from streamtap.tensor_file import TensorPlace, make_header

Array = NDArray[Any]
Shapes = Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]
#: Pieces that one system call takes.
_MOST_PIECES = 512
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
#: File systems that set no room aside.
_CANNOT = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)


class ShardFile:
    """Writes ``path`` in place; it is whole once every tensor of ``shapes`` was written.

    Raises:
        NotEnoughSpace: the disk cannot take it.
    """

    def __init__(self, path: Path, shapes: Shapes) -> None:
        header, self._places = make_header(shapes)
        self._missing = set(shapes)
        self.size_bytes = max([len(header), *(place.stop for place in self._places.values())])
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            self._reserve(path)
            self._write([header], 0)
        except BaseException:
            self.close()
            path.unlink(missing_ok=True)  # it may hold what is left of the disk
            raise

    def put(self, name: str, parts: Sequence[Array]) -> None:
        """Write a tensor, given as ``parts`` along its first axis.

        Raises:
            InvalidInput: parts of another dtype or size than was announced, or a tensor that was written before.
        """
        place: TensorPlace = self._places[name]
        size = sum(part.nbytes for part in parts)
        if name not in self._missing or size != place.stop - place.start or any(p.dtype != place.dtype for p in parts):
            raise InvalidInput(f"{name} was announced as {place.dtype} {list(place.shape)}, once; got {size} bytes.")
        self._missing.discard(name)
        start = place.start
        for first in range(0, len(parts), _MOST_PIECES):
            views = [
                np.ascontiguousarray(p).reshape(-1).view(np.uint8).data for p in parts[first : first + _MOST_PIECES]
            ]
            self._write(views, start)
            start += sum(map(len, views))

    def finish(self) -> None:
        """Close the file.

        Raises:
            InvalidInput: tensors that were announced did not come.
        """
        self.close()
        if self._missing:
            raise InvalidInput(f"{len(self._missing)} tensors of the shard did not come, {min(self._missing)} first.")

    def close(self) -> None:
        """Close the file, whole or not."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _reserve(self, path: Path) -> None:
        # A disk that is too small shows here, not in the middle of the shard.
        try:
            _allocate(self._fd, self.size_bytes)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise NotEnoughSpace(
                f"{path.parent} cannot take a shard of {self.size_bytes} bytes ({error.strerror}); free some space and "
                "run the same command again."
            ) from error

    def _write(self, views: Sequence[bytes | memoryview], start: int) -> None:
        left = [memoryview(view) for view in views if len(view)]
        while left:
            done = os.pwritev(self._fd, left, start)
            start += done
            while left and done >= len(left[0]):
                done -= len(left.pop(0))
            if left:
                left[0] = left[0][done:]


def _allocate(fd: int, size_bytes: int) -> None:
    if sys.platform == "darwin":
        os.ftruncate(fd, size_bytes)
        return
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
        os.ftruncate(fd, size_bytes)
