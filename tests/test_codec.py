"""The bytes of captured rows, both ways."""

from __future__ import annotations

import base64
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from streamtap.codec import PIECE_BYTES, base64_chunks, decode, decoded_bytes, frame_chunks, is_finite, raw_parts
from streamtap.errors import InvalidInput

FIXTURE = np.array([[1.0, -2.0], [0.5, 3.0]], ml_dtypes.bfloat16)
FIXTURE_HEX = "803f00c0003f4040"
BF16 = {"dtype": "int16", "original_dtype": "torch.bfloat16", "compression": "zstd"}


def encoded(values: NDArray[Any]) -> bytes:
    return b"".join(base64_chunks(values))


def test_the_fixture_of_the_contract() -> None:
    assert zstandard.ZstdDecompressor().decompress(b"".join(frame_chunks(FIXTURE))).hex() == FIXTURE_HEX
    assert base64.b64decode(encoded(FIXTURE)) == b"".join(frame_chunks(FIXTURE))


def test_the_frame_says_its_size() -> None:
    values = np.zeros((3, 5, 7), ml_dtypes.bfloat16)

    assert zstandard.frame_content_size(b"".join(frame_chunks(values))) == 3 * 5 * 7 * 2


def test_decodes_as_the_public_description_does() -> None:
    raw = zstandard.ZstdDecompressor().decompress(base64.b64decode(encoded(FIXTURE)))
    array = np.frombuffer(raw, dtype=np.uint16).view(ml_dtypes.bfloat16).reshape(FIXTURE.shape)

    assert np.array_equal(array, FIXTURE)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    values=arrays.arrays(
        np.float32, arrays.array_shapes(min_dims=1, max_dims=3, min_side=0), elements=st.floats(width=32)
    ),
    narrow=st.booleans(),
    turned=st.booleans(),
)
def test_any_values_come_back_bit_by_bit(values: NDArray[np.float32], narrow: bool, turned: bool) -> None:
    sent: NDArray[Any] = values.astype(ml_dtypes.bfloat16) if narrow else values
    sent = sent.T if turned else sent
    dtype, original = ("int16", "torch.bfloat16") if narrow else ("float32", "torch.float32")

    back = decode(encoded(sent), dtype=dtype, original_dtype=original, shape=sent.shape, compression="zstd")

    assert back.dtype == sent.dtype
    assert back.shape == sent.shape
    assert back.tobytes() == sent.tobytes()
    assert b"".join(raw_parts(sent)) == sent.tobytes()


def test_pieces_are_whole_groups_of_three_and_small() -> None:
    values = np.random.default_rng(0).standard_normal((4, 300, 2000)).astype(np.float32)

    pieces = list(frame_chunks(values))

    assert [len(piece) for piece in pieces[:-1]] == [PIECE_BYTES] * (len(pieces) - 1)
    assert len(pieces) > 8
    assert PIECE_BYTES % 3 == 0
    assert base64.b64decode(encoded(values)) == b"".join(pieces)


def test_half_precision_and_plain_bytes_are_read() -> None:
    half = np.array([[0.1, -3.0]], np.float16)
    data = base64.b64encode(half.tobytes())

    for compression in ("none", None):
        back = decode(data, dtype="float16", original_dtype=None, shape=[1, 2], compression=compression)
        assert np.array_equal(back, half)


def test_other_words_for_bfloat16_are_read() -> None:
    for dtype in ("int16", "uint16", "bfloat16"):
        back = decode(
            encoded(FIXTURE).decode(), dtype=dtype, original_dtype="bfloat16", shape=[2, 2], compression="zstd"
        )
        assert np.array_equal(back, FIXTURE)


def test_a_frame_without_its_size_is_read_up_to_what_is_expected() -> None:
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(FIXTURE.tobytes())

    assert np.array_equal(decode(base64.b64encode(frame), shape=[2, 2], **BF16), FIXTURE)
    with pytest.raises(InvalidInput):
        decode(base64.b64encode(frame), shape=[2, 1], **BF16)
    with pytest.raises(InvalidInput, match="0 bytes"):
        decode(base64.b64encode(frame), shape=[2, 0], **BF16)


def test_a_frame_that_says_gigabytes_is_not_unpacked() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(64 * 1024 * 1024))

    assert len(bomb) < 10_000
    with pytest.raises(InvalidInput, match="must unpack to 8 bytes, as shape and dtype say; it says 67108864"):
        decode(base64.b64encode(bomb), shape=[2, 2], **BF16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"dtype": ">f4"}, "dtype must be one of"),  # bytes the other way round
        ({"original_dtype": "torch.float32"}, "original_dtype must be 'torch.bfloat16'"),
        ({"compression": "gzip"}, "compression must be 'zstd' or 'none'"),
        ({"shape": [2, 3]}, "must unpack to 12 bytes"),
        ({"shape": []}, "shape must be"),
        ({"shape": [-2, -2]}, "shape must be"),
        ({"shape": [True, 4]}, "shape must be"),
        ({"data": "abc"}, "standard base64"),
        ({"data": "a\nbc"}, "standard base64"),
        ({"data": "äbcd"}, "standard base64"),
        ({"data": "QUJD"}, "one zstd frame"),
        ({"compression": None}, "must hold 8 bytes"),
        ({"data": base64.b64encode(b"".join([*frame_chunks(FIXTURE), b"more"]))}, "one zstd frame"),
        ({"data": base64.b64encode(b"".join(frame_chunks(FIXTURE))[:-1])}, "one zstd frame"),
    ],
)
def test_envelopes_that_contradict_themselves_are_refused(change: dict[str, Any], message: str) -> None:
    envelope: dict[str, Any] = {"data": encoded(FIXTURE), "shape": [2, 2], **BF16} | change

    with pytest.raises(InvalidInput, match=message):
        decode(envelope.pop("data"), **envelope)


def test_other_dtypes_are_not_written() -> None:
    with pytest.raises(InvalidInput, match="bfloat16 or float32; got float64"):
        list(frame_chunks(np.zeros((1, 1))))


def test_a_size_is_known_before_anything_is_unpacked() -> None:
    assert decoded_bytes(dtype="int16", original_dtype=None, shape=[3, 4]) == 24


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_bad_value_is_found_wherever_it_stands(dtype: Any, value: float) -> None:
    largest = float(ml_dtypes.finfo(dtype).max)
    values = np.full((2100, 1000), largest, dtype)  # three pieces
    assert is_finite(values)

    for place in ((0, 0), (1048, 999), (2099, 999)):
        values[place] = value
        assert not is_finite(values)
        values[place] = -largest
    assert is_finite(values)


def test_values_need_not_lie_in_order() -> None:
    values = np.ones((5, 8), ml_dtypes.bfloat16)
    values[3, 3] = np.nan

    assert is_finite(values[:, ::2])
    assert not is_finite(values.T)


NOISE = np.random.default_rng(0).standard_normal(60_000).astype(np.float32)
F32 = {"dtype": "float32", "original_dtype": None, "compression": "zstd", "shape": NOISE.shape}
FRAMES = {
    "sized": zstandard.ZstdCompressor().compress(NOISE.tobytes()),
    "checked": zstandard.ZstdCompressor(write_checksum=True).compress(NOISE.tobytes()),
    "unsized": zstandard.ZstdCompressor(write_content_size=False).compress(NOISE.tobytes()),
}


@pytest.mark.parametrize("kind", FRAMES)
def test_a_frame_of_many_pieces_is_read_whole_or_not_at_all(kind: str) -> None:
    frame = FRAMES[kind]
    assert len(frame) > 200_000
    assert np.array_equal(decode(base64.b64encode(frame), **F32), NOISE)

    for cut in (1, 2, 3, 4, 5, 7, 100_000, 200_000):
        with pytest.raises(InvalidInput, match="one zstd frame"):
            decode(base64.b64encode(frame[:-cut]), **F32)
    for more in (b"m", b"more", bytes(70_000), frame, FRAMES["sized"]):
        with pytest.raises(InvalidInput, match="one zstd frame"):
            decode(base64.b64encode(frame + more), **F32)


def test_base64_that_ends_at_the_border_of_a_piece_and_goes_on_is_refused() -> None:
    data = base64.b64encode(FRAMES["sized"])

    with pytest.raises(InvalidInput, match="in one run"):
        decode(data[: 64 * 1024 - 4] + b"QQ==" + data[64 * 1024 :], **F32)


def test_a_flipped_bit_of_a_checked_frame_is_seen() -> None:
    frame = bytearray(FRAMES["checked"])
    frame[100_000] ^= 1

    with pytest.raises(InvalidInput, match="one zstd frame"):
        decode(base64.b64encode(bytes(frame)), **F32)
