"""Stretches of files on their way to a stream."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamtap.harvest import spans_of_file
from streamtap.harvest.spans_of_file import read_spans
from streamtap.harvest.stream_reading import StreamRows, units_ahead

SIZE = 200_000


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("file") / "bytes"
    path.write_bytes(np.random.default_rng(0).bytes(SIZE))
    return path


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, 50_000)), max_size=40),
    st.sampled_from([0, 100, 1 << 15]),
    st.sampled_from([3, 1000]),
    st.sampled_from([7, 1 << 30]),
)
def test_every_span_comes_to_its_place(file: Path, wanted: Any, gap: int, pieces: int, at_once: int) -> None:
    """In any order, far apart or overlapping, and however little a call brings."""
    spans = [(start, min(SIZE, start + length)) for start, length in wanted]
    into = [bytearray(stop - start) for start, stop in spans]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spans_of_file, "_GAP_BYTES", gap)
        patch.setattr(spans_of_file, "_MOST_PIECES", pieces)
        if at_once < 1 << 30:
            spans, into = [(a, min(b, a + 40)) for a, b in spans], [each[:40] for each in into]
            whole = spans_of_file.os.preadv
            patch.setattr(spans_of_file.os, "preadv", lambda fd, views, start: whole(fd, [views[0][:at_once]], start))
        read_spans(file, spans, [memoryview(each) for each in into])
    data = file.read_bytes()
    assert [bytes(each) for each in into] == [data[start:stop] for start, stop in spans]


def test_the_end_of_a_file_is_told(file: Path) -> None:
    with pytest.raises(EOFError):
        read_spans(file, [(SIZE - 4, SIZE + 4)], [memoryview(bytearray(8))])
    with pytest.raises(FileNotFoundError):
        read_spans(file.with_name("none"), [(0, 1)], [memoryview(bytearray(1))])


def test_units_come_in_order_and_few_are_held() -> None:
    """However fast they are read, what was not taken stays within its bound, but for one that is larger."""
    begun: list[int] = []
    lock = threading.Lock()

    def read(number: int, *_: int) -> list[Any]:
        with lock:
            begun.append(number)
        time.sleep(0.002 * (number % 3))
        return [np.full((1, 1), number)]

    units = [(number, 0, 1) for number in range(30)]
    sizes = [1 << 24 if number < 20 else 1 << 28 for number in range(30)]
    taken = 0
    for rows in units_ahead(read, units, sizes):
        assert rows[0][0, 0] == taken
        time.sleep(0.005)
        # Of 64 MiB four, and of larger ones two; one more is in the hands of the caller.
        assert len(begun) - taken <= (5 if taken < 15 else 3 if taken >= 20 else 5)
        taken += 1
    assert taken == 30


def test_a_reader_that_fails_ends_it() -> None:
    def read(number: int, *_: int) -> list[Any]:
        if number == 3:
            raise FileNotFoundError
        return [np.full((1, 1), number)]

    taken: list[int] = []
    with pytest.raises(FileNotFoundError):
        taken.extend(rows[0][0, 0] for rows in units_ahead(read, [(number, 0, 1) for number in range(9)], [1] * 9))
    assert taken == [0, 1, 2]


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("layers", [(1,), (1, 3)])
@pytest.mark.parametrize("drop", [False, True])
def test_a_unit_is_the_rows_of_its_prompts(runs: Any, compression: str, layers: Any, drop: bool) -> None:
    run = runs(compression=compression)
    rows = StreamRows([run], layers, drop_special=drop)
    for shard, first, stop in ((0, 0, 8), (2, 3, 5), (11, 1, 2)):
        prompts = run.manifest.shards[shard].prompt_indices[first:stop]
        found = rows.read(shard, first, stop)
        for layer, mine in zip(layers, found, strict=True):
            # BOS is the first token of each.
            theirs = np.concatenate([run.prompt(i, layer)[layer][int(drop) :] for i in prompts])
            assert np.array_equal(mine, theirs)
        assert len(found[0]) == rows.wanted[shard][first:stop].sum()
