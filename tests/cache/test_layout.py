"""Chunks: sizes, places and what plain numpy makes of the description."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest

from streamtap.cache.layout import Channel, ChunkLayout
from streamtap.errors import InvalidInput


def test_a_piece_is_about_256_kb_and_starts_aligned() -> None:
    layout = ChunkLayout.of([Channel("layer_0", "float32", 576), Channel("odd", "float16", 7)])
    assert 0.9 * (1 << 18) < layout.rows_per_chunk * 576 * 4 <= 1 << 18
    assert all(offset % 8 == 0 for offset in layout.offsets.values())


def test_a_row_wider_than_a_piece_still_fits() -> None:
    layout = ChunkLayout.of([Channel("logits", "float32", 200_000)])
    assert layout.rows_per_chunk == 8
    assert layout.size_bytes(9) == 2 * layout.chunk_bytes


def test_segments_cut_where_chunks_end() -> None:
    layout = ChunkLayout((Channel("a", "float32", 1),), 8)
    found = [(each.chunk, each.place, each.start, each.stop) for each in layout.segments(6, 12)]
    assert found == [(0, 6, 0, 2), (1, 0, 2, 10), (2, 0, 10, 12)]
    assert list(layout.segments(6, 0)) == []


def test_json_round_trip_and_plain_numpy_dtype() -> None:
    layout = ChunkLayout.of([Channel("a", "bfloat16", 3), Channel("b", "float64", 5)])
    text = layout.to_json()
    assert ChunkLayout.from_json(text) == layout
    fields = json.loads(text)["numpy"]
    plain = np.dtype([(name, base, tuple(shape)) for name, base, shape in fields])
    assert plain.itemsize == layout.chunk_bytes
    assert plain["a"].base == np.dtype("<u2")
    assert layout.dtype["a"].base == np.dtype(ml_dtypes.bfloat16)


def test_the_dtype_is_written_one_way() -> None:
    assert Channel("a", "<f4", 2) == Channel("a", "float32", 2)


@pytest.mark.parametrize(
    ("name", "dtype", "width"),
    [("token_ids", "float32", 1), ("a/b", "float32", 1), ("", "float32", 1), ("a", "float32", 0)]
    + [("a", bad, 1) for bad in ("object", "complex64", "nonsense", "U4", "longdouble")],
)
def test_channels_that_cannot_be_stored_are_refused(name: str, dtype: str, width: int) -> None:
    with pytest.raises(InvalidInput, match="channel"):
        Channel(name, dtype, width)


def test_a_name_twice_is_refused() -> None:
    with pytest.raises(InvalidInput, match="once"):
        ChunkLayout.of([Channel("a", "float32", 1), Channel("a", "float32", 1)])
