"""What reading a run costs: bytes over a network, memory, open files."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamtap.harvest.plan import Tokenised
from streamtap.harvested.reader import HarvestedRun

Make = Callable[..., Any]
SHARD = "shard_00000.safetensors"
#: 12 prompts of 64 tokens in files of 4: 4 prompts x 4 layers x 64 rows x 512 numbers x 4 bytes is 2 MiB a file.
ROW_BYTES = 512 * 4
LAYER_BYTES = 64 * ROW_BYTES


@pytest.fixture(scope="module")
def large(make_run: Make) -> Any:
    prompts = [Tokenised((np.arange(64) * 7 + i).astype(np.int32) % 97) for i in range(12)]
    return make_run(prompts=prompts, hidden=512, layers=[0, 1, 2, 3], dtype="float32")


@pytest.fixture
def far(large: Any, counted: Make) -> Any:
    return counted(large.folder)


def test_one_layer_of_one_prompt_is_its_bytes_alone(large: Any, far: Any) -> None:
    run = HarvestedRun.open(far)
    rows = run.prompt(1, 2)[2]

    assert np.array_equal(rows, large.rows(1, 2))
    names = {name for name, *_ in far.asked}
    assert names == {"manifest.json", SHARD}
    assert far.bytes_of(SHARD) == LAYER_BYTES + (1 << 14)
    assert [stop - start for name, start, stop in far.asked if name == SHARD] == [1 << 14, LAYER_BYTES]


def test_the_header_is_read_once(large: Any, far: Any) -> None:
    run = HarvestedRun.open(far)
    for i in (0, 1, 2, 3, 0):
        assert np.array_equal(run.prompt(i, 1)[1], large.rows(i, 1))

    assert far.bytes_of(SHARD) == 5 * LAYER_BYTES + (1 << 14)


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize("is_far", [False, True])
def test_a_header_longer_than_most(
    make_run: Make, counted: Make, monkeypatch: pytest.MonkeyPatch, compression: str, is_far: bool
) -> None:
    monkeypatch.setattr("streamtap.harvested.shard_reader._HEAD_BYTES", 9)
    monkeypatch.setattr("streamtap.harvested.file_bytes._SMALL_BYTES", 0)
    made = make_run(compression=compression)
    run = HarvestedRun.open(counted(made.folder) if is_far else made.folder)

    assert all(np.array_equal(run.prompt(i)[2], made.rows(i, 2)) for i in range(11))


def test_token_ids_of_a_file_come_in_one_request(large: Any, far: Any) -> None:
    run = HarvestedRun.open(far)
    for i in range(4):
        assert run.token_ids(i).tolist() == large.prompts[i].token_ids.tolist()

    assert [stop - start for name, start, stop in far.asked if name == SHARD] == [1 << 14, 4 * 64 * 4]


def test_threads_that_read_one_file_share_its_header(large: Any, far: Any) -> None:
    run = HarvestedRun.open(far)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(run.token_ids, [0, 1, 2, 3] * 8))

    assert all(ids.tolist() == large.prompts[i % 4].token_ids.tolist() for i, ids in enumerate(found))
    assert len([name for name, *_ in far.asked if name == SHARD]) == 2


def test_layers_side_by_side_are_one_request_and_far_ones_are_not(large: Any, far: Any) -> None:
    run = HarvestedRun.open(far)
    run.prompt(0, [0])
    before = len(far.asked)
    run.prompt(0, [0, 1])
    assert len(far.asked) == before + 1
    run.prompt(0, [0, 3])

    assert [stop - start for _, start, stop in far.asked[before + 1 :]] == [LAYER_BYTES] * 2


def test_long_stretches_come_several_at_once(large: Any, far: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamtap.harvested.file_bytes._REQUEST_BYTES", 100_000)
    found = HarvestedRun.open(far).activations([0, 1, 2, 3])

    for i in range(4):
        assert all(np.array_equal(rows, large.rows(i, layer)) for layer, rows in found.prompt(i).items())
    assert len([name for name, *_ in far.asked if name == SHARD]) > 20


def test_a_small_file_comes_in_one_request(make_run: Make, counted: Make) -> None:
    made = make_run(positions="last")
    place = counted(made.folder)
    run = HarvestedRun.open(place)
    for i in range(4):
        assert np.array_equal(run.prompt(i)[2], made.rows(i, 2))
        run.token_ids(i)

    assert [name for name, *_ in place.asked] == ["manifest.json", SHARD]


def test_unpacked_files_are_kept_up_to_a_bound(make_run: Make, counted: Make) -> None:
    made = make_run(compression="zstd")
    for cache_bytes, fetched in ((0, 4), (1 << 20, 2)):
        place = counted(made.folder)
        run = HarvestedRun.open(place, cache_bytes=cache_bytes)
        for i in (0, 1, 5, 0, 6):
            assert np.array_equal(run.prompt(i)[2], made.rows(i, 2))
        assert len([name for name, *_ in place.asked if name.startswith("shard_")]) == fetched


def test_many_files_are_not_all_open(make_run: Make) -> None:
    made = make_run(n_prompts=150, shard_size=1, layers=[1])
    run = HarvestedRun.open(made.folder)
    before = _open_files()
    for i in range(150):
        assert np.array_equal(run.prompt(i)[1], made.rows(i, 1))

    assert _open_files() - before <= 64


def _open_files() -> int:
    place = Path("/proc/self/fd") if Path("/proc/self/fd").exists() else Path("/dev/fd")
    return len(os.listdir(place))


@pytest.mark.parametrize("is_far", [False, True])
def test_going_through_all_files_holds_one(make_run: Make, counted: Make, is_far: bool) -> None:
    prompts = [Tokenised((np.arange(64) * 7 + i).astype(np.int32) % 97) for i in range(24)]
    made = make_run(prompts=prompts, hidden=512, layers=[0, 1], dtype="float32", compression="zstd", shard_size=2)
    file_bytes = 2 * 2 * LAYER_BYTES
    run = HarvestedRun.open(counted(made.folder) if is_far else made.folder)
    tracemalloc.start()
    try:
        for shard in run.shards():
            for i in shard.indices:
                assert shard.prompt(i)[1].shape == (64, 512)
        assert tracemalloc.get_traced_memory()[1] < 4 * file_bytes
    finally:
        tracemalloc.stop()
