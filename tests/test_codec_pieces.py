"""Frames that are read and made while their values pass."""

from __future__ import annotations

import base64
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import zstandard
from numpy.typing import NDArray

from streamtap.codec import HEAD_CHARACTERS, FrameReader, FrameWriter, base64_chunks, decode, said_bytes
from streamtap.errors import InvalidInput

NOISE = np.random.default_rng(0).normal(size=300_000).astype(ml_dtypes.bfloat16)


def _read(data: bytes, expected: int, size: int) -> bytes:
    taken: list[bytes] = []
    reader = FrameReader(expected, taken.append)
    for at in range(0, len(data), size):
        reader.feed(data[at : at + size])
    reader.end()
    return b"".join(taken)


@pytest.mark.parametrize("size", [1, 3, 1000, 1_000_000])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 500])
def test_values_come_back_whatever_the_pieces(count: int, size: int) -> None:
    values = NOISE[:count]
    data = b"".join(base64_chunks(values))

    assert _read(data, values.nbytes, size) == values.tobytes()
    assert said_bytes(data) == said_bytes(data[:HEAD_CHARACTERS]) == values.nbytes


def test_a_long_frame_comes_little_by_little_however_far_it_unpacks() -> None:
    sizes: list[int] = []
    zeros = np.zeros(5_000_000, np.float32)
    reader = FrameReader(zeros.nbytes, lambda piece: sizes.append(len(piece)))

    reader.feed(b"".join(base64_chunks(zeros)))
    reader.end()

    assert sum(sizes) == zeros.nbytes
    assert max(sizes) <= 1 << 18


def _broken() -> dict[str, bytes]:
    values = NOISE[:500].tobytes()
    frame = zstandard.ZstdCompressor().compress(values)
    return {
        "cut short": base64.b64encode(frame[:-5]),
        "cut in a character": base64.b64encode(frame)[:-1] if len(frame) % 3 else base64.b64encode(frame)[:-2],
        "more behind": base64.b64encode(frame + b"abcdef"),
        "a second frame": base64.b64encode(frame + frame),
        "an end in the middle": base64.b64encode(frame[:100]) + base64.b64encode(frame[100:]),
        "not base64": base64.b64encode(frame).replace(b"A", b"!"),
        "not zstd": base64.b64encode(values),
        "nothing": b"",
    }


@pytest.mark.parametrize("size", [4, 1_000_000])
@pytest.mark.parametrize("name", _broken())
def test_what_is_not_one_whole_frame_is_refused(name: str, size: int) -> None:
    with pytest.raises(InvalidInput, match="data must be"):
        _read(_broken()[name], 1000, size)


def test_a_frame_of_another_size_than_expected_is_refused() -> None:
    data = b"".join(base64_chunks(NOISE[:500]))

    for expected in (998, 1002):
        with pytest.raises(InvalidInput, match="one zstd frame"):
            _read(data, expected, 100)


@pytest.mark.parametrize("data", [b"", b"AAAA", base64.b64encode(b"x" * 40), b"!" * 24])
def test_what_says_no_size_is_no_frame(data: bytes) -> None:
    with pytest.raises(InvalidInput, match="data must be"):
        said_bytes(data)


def test_a_frame_that_hides_its_size_is_none() -> None:
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(100))

    with pytest.raises(InvalidInput, match="says its size"):
        said_bytes(base64.b64encode(unsized))


def test_what_a_taker_raises_comes_out() -> None:
    def refuse(_piece: bytes) -> None:
        raise ArithmeticError("stop")

    with pytest.raises(ArithmeticError, match="stop"):
        FrameReader(1000, refuse).feed(b"".join(base64_chunks(NOISE[:500])))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize("parts", [[], [3], [1, 5, 0, 1000], [250_000, 50_000]])
def test_values_that_come_in_parts_make_one_frame(parts: list[int], dtype: Any) -> None:
    values: NDArray[Any] = NOISE[: sum(parts)].astype(np.float32).astype(dtype)
    writer = FrameWriter(values.nbytes)

    made, at = [], 0
    for count in parts:
        made += writer.take(values[at : at + count])
        at += count
    made += writer.end()

    assert all(len(piece) % 4 == 0 for piece in made)
    name = values.dtype.name
    back = decode(
        b"".join(made),
        dtype="int16" if name == "bfloat16" else name,
        original_dtype=None,
        shape=values.shape,
        compression="zstd",
    )
    assert back.tobytes() == values.tobytes()
