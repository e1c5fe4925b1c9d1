"""Shard files: safetensors of rows, written and hashed as they come, and read by the row."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamtap import tensor_file
from streamtap.dataset.manifest import FileSum
from streamtap.errors import DatasetDamaged, InvalidInput
from streamtap.tensor_file import LENGTH_BYTES, make_header

Array = NDArray[Any]
#: Tensor name to dtype and shape [rows, width].
Shapes = Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]


@dataclass(frozen=True)
class Tensor:
    """A tensor [rows, width] of a shard file, whose bytes begin at ``start`` of the file."""

    dtype: np.dtype[Any]
    rows: int
    width: int
    start: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.width * self.dtype.itemsize

    @property
    def stop(self) -> int:
        """Where its bytes end."""
        return self.start + self.rows * self.row_bytes


class ShardWriter:
    """Writes one shard file from front to back; tensors are filled in the order given.

    Args:
        path: The file, which must not exist.
        tensors: What it will hold.

    Raises:
        InvalidInput: a dtype that the format has no name for.
    """

    def __init__(self, path: Path, tensors: Shapes) -> None:
        header, _ = make_header(tensors)
        self._left = [(np.dtype(dtype), shape[1], shape[0]) for dtype, shape in tensors.values()]
        self._sum = hashlib.sha256()
        self._size_bytes = 0
        self._file = path.open("xb", buffering=0)
        self._put(header)

    def close(self) -> None:
        """Close the file, whole or not."""
        self._file.close()

    def write(self, rows: Array) -> None:
        """Append rows [some, width] to the tensor that is being filled.

        Raises:
            InvalidInput: rows of another dtype or width, or more than were announced.
        """
        if not len(rows):
            return
        while self._left and self._left[0][2] == 0:
            self._left.pop(0)
        dtype, width, left = self._left[0] if self._left else (rows.dtype, -1, 0)
        if rows.dtype != dtype or rows.ndim != 2 or rows.shape[1] != width or len(rows) > left:
            raise InvalidInput(
                f"the next rows of this shard are {left} of {dtype} [{width}]; got {rows.dtype} {list(rows.shape)}."
            )
        self._left[0] = (dtype, width, left - len(rows))
        self._put(np.ascontiguousarray(rows).view(np.uint8).reshape(-1).data)

    def finish(self) -> FileSum:
        """Close the file and say its size and hash.

        Raises:
            InvalidInput: fewer rows came than were announced.
        """
        if missing := sum(left for _, _, left in self._left):
            raise InvalidInput(f"{missing} rows that this shard announced did not come.")
        self._file.close()
        return FileSum(self._size_bytes, self._sum.hexdigest())

    def _put(self, data: bytes | memoryview) -> None:
        self._sum.update(data)
        self._size_bytes += len(data)
        while len(data):
            data = data[self._file.write(data) :]


def header_bytes(length: bytes, name: str) -> int:
    """Length of the header, from a file's first 8 bytes.

    Raises:
        DatasetDamaged: no safetensors file.
    """
    with _damage_is_said():
        return tensor_file.header_bytes(length, name)


def parse_header(text: bytes, name: str) -> dict[str, Tensor]:
    """The tensors that a header names.

    Raises:
        DatasetDamaged: a header that means nothing, or tensors of a dtype or shape that rows cannot have.
    """
    with _damage_is_said():
        places = tensor_file.parse_header(text, name)[0]
    if any(len(place.shape) != 2 for place in places.values()):
        raise DatasetDamaged(f"the header of {name} is damaged (shape).")
    return {key: Tensor(place.dtype, place.shape[0], place.shape[1], place.start) for key, place in places.items()}


@contextmanager
def _damage_is_said() -> Iterator[None]:
    try:
        yield
    except InvalidInput as error:
        raise DatasetDamaged(str(error)) from error


def read_header(path: Path, name: str) -> dict[str, Tensor]:
    """The tensors of a file on this machine.

    Raises:
        DatasetDamaged: it is not a safetensors file, or is cut short.
    """
    with path.open("rb") as file:
        tensors = parse_header(file.read(header_bytes(file.read(LENGTH_BYTES), name)), name)
        size = file.seek(0, 2)
    if any(tensor.stop > size for tensor in tensors.values()):
        raise DatasetDamaged(f"{name} is cut short: it has {size} bytes, and its header names more.")
    return tensors


def read_into(path: Path, tensor: Tensor, places: NDArray[np.int64], out: Array) -> None:
    """Copy rows ``places`` [some] of a tensor to ``out`` [some, width], in the dtype of ``out``."""
    if len(places) == 0:
        return
    first = int(places[0])
    if bool((np.diff(places) == 1).all()):
        if out.dtype == tensor.dtype and out.flags.c_contiguous:
            _read_run(path, tensor.start + first * tensor.row_bytes, out)
        else:
            out[:] = _mapped(path, tensor)[first : first + len(places)]
        return
    out[:] = _mapped(path, tensor)[places]


def _read_run(path: Path, start: int, out: Array) -> None:
    # Reading into the array costs one copy; a map would cost a fault a page.
    data = out.view(np.uint8).reshape(-1).data
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while len(data):
            got = file.readinto(data)
            if not got:
                raise DatasetDamaged(f"{path.name} ends before its rows do.")
            data = data[got:]


def _mapped(path: Path, tensor: Tensor) -> Array:
    return np.memmap(path, tensor.dtype, "r", tensor.start, (tensor.rows, tensor.width))
