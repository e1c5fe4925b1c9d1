"""The bytes of captured rows: a zstd frame of C-ordered little-endian values, and its base64, made piece by piece.

::

    values [layers, rows, hidden] ─► frame_chunks ─► base64_chunks ─► "data" ─► decode ─► values
    "data" in pieces ─► FrameReader ─► values, little by little ─► FrameWriter ─► "data" in pieces
"""

from __future__ import annotations

import binascii
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, cast

import ml_dtypes
import numpy as np
import pybase64
import zstandard
from numpy.typing import NDArray

from streamtap.errors import InvalidInput

Array = NDArray[Any]

#: What an envelope calls the values that we send, by numpy's name: how they are stored, and what they were.
WIRE_DTYPES = {"bfloat16": ("int16", "torch.bfloat16"), "float32": ("float32", "torch.float32")}

#: Bytes of a frame in one piece: a multiple of 3, so that base64 pieces join without padding between; 1 MiB as base64.
PIECE_BYTES = 3 * 256 * 1024

LEVEL = 1

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_BF16_EXPONENT = np.uint16(0x7F80)
#: Values looked at in one go: enough to be quick, and little beside the rows themselves.
_PIECE_VALUES = 1 << 20
#: What may be read: how it is stored, what it may be said to have been, and what numpy calls it.
_READABLE: dict[str, tuple[str, np.dtype[Any]]] = {
    "int16": ("bfloat16", _BFLOAT16),
    "uint16": ("bfloat16", _BFLOAT16),
    "bfloat16": ("bfloat16", _BFLOAT16),
    "float16": ("float16", np.dtype("<f2")),
    "float32": ("float32", np.dtype("<f4")),
}
_COMPRESSIONS = (None, "none", "zstd")
#: Characters of base64 read in one go: small enough that the piece comes from memory that is at hand already.
_TEXT_PIECE = 64 * 1024
#: Characters that hold a frame's header, the longest too.
HEAD_CHARACTERS = 24
#: Read behind a frame that is whole: the library does not say of a stream whether its frame ended.
_MARKER = b"."
_MARKER_FRAME = zstandard.ZstdCompressor(write_content_size=True).compress(_MARKER)


def frame_chunks(values: Array) -> Iterator[bytes]:
    """One zstd frame of ``values``, with its content size, in pieces of ``PIECE_BYTES`` but for the last.

    ``values`` is bfloat16 or float32 of any shape and need not be dense: a part that is not is copied by itself.
    The work is done outside the interpreter lock, so frames of several threads are made side by side.

    Raises:
        InvalidInput: values of another dtype.
    """
    _check_writable(values)
    chunker = zstandard.ZstdCompressor(level=LEVEL).chunker(size=values.nbytes, chunk_size=PIECE_BYTES)
    for part in raw_parts(values):
        yield from chunker.compress(part)
    yield from chunker.finish()  # type: ignore[no-untyped-call]


def base64_chunks(values: Array) -> Iterator[bytes]:
    """``frame_chunks`` as standard base64, ASCII, without line breaks.

    Raises:
        InvalidInput: values of another dtype.
    """
    return map(pybase64.b64encode, frame_chunks(values))


def raw_parts(values: Array) -> Iterator[memoryview]:
    """The plain little-endian bytes of ``values``, C order, without a copy where the values are dense.

    Raises:
        InvalidInput: values of another dtype.
    """
    _check_writable(values)
    for part in _dense_parts(values):
        stored = part.astype("<f4", copy=False) if part.dtype == np.float32 else part.view("<u2")
        yield stored.reshape(-1).data.cast("B") if stored.size else memoryview(b"")


def _dense_parts(values: Array) -> Iterable[Array]:
    if values.flags.c_contiguous or values.ndim < 2:
        return [np.ascontiguousarray(values)]
    return map(np.ascontiguousarray, values)


def compress_file(source: Path, target: Path) -> None:
    """Write ``target``, one zstd frame of what ``source`` holds; a few MB are held."""
    with source.open("rb") as raw, target.open("wb") as packed:
        zstandard.ZstdCompressor(level=LEVEL).copy_stream(raw, packed, size=source.stat().st_size)


def decompressed(packed: bytes | memoryview, name: str, *, most_bytes: int | None = None) -> bytes:
    """What the one zstd frame of a file holds; all of it is held.

    Raises:
        InvalidInput: it is no such frame, or says that it holds more than ``most_bytes``.
    """
    try:
        if most_bytes is not None and zstandard.frame_content_size(packed) > most_bytes:
            raise InvalidInput(f"{name} unpacks to more than the {most_bytes} bytes that it may have.")
        return zstandard.ZstdDecompressor().decompress(packed, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise InvalidInput(f"{name} is not one zstd frame that says its size.") from error


def _check_writable(values: Array) -> None:
    if values.dtype.name not in WIRE_DTYPES:
        raise InvalidInput(f"values on the wire are {' or '.join(WIRE_DTYPES)}; got {values.dtype.name}.")


def is_finite(values: Array) -> bool:
    """Whether every value [rows, …] is, of bfloat16 or any numpy float, looked at in pieces of a few MB."""
    if values.dtype.name != "bfloat16":
        return all(bool(np.isfinite(piece).all()) for piece in _pieces(values))
    # Its exponent is all ones where it is not; to widen every value would take four times as long.
    bits = (piece.view(np.uint16) & _BF16_EXPONENT for piece in _pieces(values))
    return not any(bool((piece == _BF16_EXPONENT).any()) for piece in bits)


def _pieces(values: Array) -> Iterator[Array]:
    rows = max(1, _PIECE_VALUES // max(1, values[:1].size))
    return (values[start : start + rows] for start in range(0, len(values), rows))


def decode(
    data: str | bytes, *, dtype: str, original_dtype: str | None, shape: Sequence[int], compression: str | None
) -> Array:
    """The values of one envelope: an array of ``shape``, read-only, in bfloat16, float16 or float32.

    Nothing is unpacked before the size that it says of itself fits ``shape``.

    Raises:
        InvalidInput: the parts of the envelope contradict each other; the message says which.
    """
    kept = _dtype_of(dtype, original_dtype)
    expected = _nbytes_of(shape, kept)
    if compression not in _COMPRESSIONS:
        raise InvalidInput("compression must be 'zstd' or 'none'.")
    raw = _unpacked(data, expected) if compression == "zstd" else _from_base64(data)
    if len(raw) != expected:
        raise InvalidInput(
            f"data must hold {expected} bytes for shape {list(shape)} of {kept.name}; it holds {len(raw)}."
        )
    return np.frombuffer(raw, kept).reshape(tuple(shape))


def decoded_bytes(*, dtype: str, original_dtype: str | None, shape: Sequence[int]) -> int:
    """Bytes that an envelope of this dtype and shape unpacks to.

    Raises:
        InvalidInput: a dtype or shape that cannot be.
    """
    return _nbytes_of(shape, _dtype_of(dtype, original_dtype))


def _dtype_of(dtype: str, original_dtype: str | None) -> np.dtype[Any]:
    if dtype not in _READABLE:
        raise InvalidInput(f"dtype must be one of {', '.join(_READABLE)}.")
    was, kept = _READABLE[dtype]
    if original_dtype is not None and original_dtype.removeprefix("torch.") != was:
        raise InvalidInput(f"original_dtype must be 'torch.{was}' where dtype is {dtype!r}.")
    return kept


def _nbytes_of(shape: Sequence[int], dtype: np.dtype[Any]) -> int:
    if not all(type(length) is int and length >= 0 for length in shape) or not 1 <= len(shape) <= 8:
        raise InvalidInput("shape must be a list of 1 to 8 whole numbers, 0 or more.")
    return math.prod(shape) * dtype.itemsize


def _from_base64(data: str | bytes | memoryview) -> bytes:
    try:
        return pybase64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidInput("data must be standard base64 without line breaks; it is not.") from error


def said_bytes(data: bytes) -> int:
    """What a frame says that it unpacks to, from its base64 or the first ``HEAD_CHARACTERS`` of that.

    Raises:
        InvalidInput: it is no zstd frame that says its size.
    """
    try:
        size = zstandard.frame_content_size(_from_base64(data[:HEAD_CHARACTERS]))
    except zstandard.ZstdError as error:
        raise _no_frame() from error
    if size < 0:
        raise _no_frame()
    return size


class FrameReader:
    """Unpacks a frame of ``expected`` bytes whose base64 comes in pieces.

    ``take`` is given what it holds, in order and little by little, however far it unpacks; what ``take`` raises comes
    out of ``feed`` and ``end``.
    """

    def __init__(self, expected: int, take: Callable[[bytes], None]) -> None:
        self._sink = _Sink(expected, take)
        self._writer = zstandard.ZstdDecompressor().stream_writer(cast("IO[bytes]", self._sink))
        self._expected = expected
        self._text = b""
        self._padded = False

    def feed(self, text: bytes) -> None:
        """Take the next characters.

        Raises:
            InvalidInput: they are no base64, or not of such a frame.
        """
        held = self._text + text
        whole = len(held) // 4 * 4
        self._text = held[whole:]
        for start in range(0, whole, _TEXT_PIECE):
            piece = held[start : min(whole, start + _TEXT_PIECE)]
            raw = _from_base64(piece)
            if self._padded:
                raise InvalidInput("data must be standard base64 in one run; it ends and goes on.")
            self._padded = len(raw) < len(piece) // 4 * 3
            self._write(raw)

    def end(self) -> None:
        """Check that the frame was whole, now that nothing follows.

        Raises:
            InvalidInput: it was cut short, or something stands behind it.
        """
        if not self._text:
            self._write(_MARKER_FRAME)
        # What was cut short eats the marker, and what is too long stands before it.
        if self._text or self._sink.left or self._sink.behind != _MARKER:
            raise _not_whole(self._expected)

    def _write(self, raw: bytes) -> None:
        try:
            self._writer.write(raw)
        except zstandard.ZstdError as error:
            raise _not_whole(self._expected) from error


class FrameWriter:
    """Makes a frame of ``nbytes`` bytes, as base64, of values that come in parts."""

    def __init__(self, nbytes: int) -> None:
        self._chunker = zstandard.ZstdCompressor(level=LEVEL).chunker(size=nbytes, chunk_size=PIECE_BYTES)

    def take(self, values: Array) -> Iterator[bytes]:
        """What is ready of the base64 once ``values`` are in, in pieces.

        Raises:
            InvalidInput: values of a dtype that is not sent.
        """
        for part in raw_parts(values):
            yield from map(pybase64.b64encode, self._chunker.compress(part))

    def end(self) -> Iterator[bytes]:
        """The rest of it."""
        yield from map(pybase64.b64encode, self._chunker.finish())  # type: ignore[no-untyped-call]


class _Sink:
    """Where a frame is unpacked to: ``left`` bytes are still to come, and ``behind`` is what came after them."""

    def __init__(self, expected: int, take: Callable[[bytes], None]) -> None:
        self.left = expected
        self.behind = b""
        self._take = take

    def write(self, piece: bytes) -> int:
        own, more = piece[: self.left], piece[self.left :]
        self.left -= len(own)
        # A byte more than belongs there is enough to know it.
        self.behind = (self.behind + more)[: len(_MARKER) + 1]
        if own:
            self._take(own)
        return len(piece)


def _no_frame() -> InvalidInput:
    return InvalidInput("data must be one zstd frame that says its size; it is not.")


def _not_whole(expected: int) -> InvalidInput:
    return InvalidInput(f"data must be one zstd frame of {expected} bytes, whole and alone; it is not.")


def _frame_pieces(data: str | bytes) -> Iterator[bytes]:
    """What base64 holds, piece by piece, and behind it the marker."""
    text = data if isinstance(data, str) else memoryview(data)
    for start in range(0, len(text), _TEXT_PIECE):
        piece = _from_base64(text[start : start + _TEXT_PIECE])
        if start + _TEXT_PIECE < len(text) and len(piece) < _TEXT_PIECE // 4 * 3:
            raise InvalidInput("data must be standard base64 in one run; it ends and goes on.")
        yield piece
    yield _MARKER_FRAME


class _Source:
    """Pieces as a file, whatever the size that is asked for."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces

    def read(self, _size: int = -1) -> bytes:
        return next(self._pieces, b"")


def _unpacked(data: str | bytes, expected: int) -> Array:
    """The frame's content, straight into its array: a piece of the frame is all that is held beside it."""
    said = _not_whole(expected)
    try:
        size = zstandard.frame_content_size(_from_base64(data[:HEAD_CHARACTERS]))
        if size not in (-1, expected):
            raise InvalidInput(f"data must unpack to {expected} bytes, as shape and dtype say; it says {size}.")
        reader = zstandard.ZstdDecompressor().stream_reader(cast("IO[bytes]", _Source(_frame_pieces(data))))
        raw = np.empty(expected, np.uint8)
        filled = _fill(raw, reader)
        # What was cut short eats the marker, and what is too long stands before it.
        is_whole = filled == expected and reader.read(len(_MARKER) + 1) == _MARKER
    except zstandard.ZstdError as error:
        raise said from error
    if not is_whole:
        raise said
    raw.flags.writeable = False
    return raw


def _fill(raw: Array, reader: zstandard.ZstdDecompressionReader) -> int:
    room, filled = raw.data, 0
    while filled < len(room) and (more := reader.readinto(room[filled:])):
        filled += more
    return filled
