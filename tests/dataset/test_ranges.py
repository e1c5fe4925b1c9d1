from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamtap.dataset.ranges import PIECE_BYTES, RangeStore

PATH = "tensors/hidden_layer007_shard000.safetensors"


def _content(n_bytes: int) -> bytes:
    return bytes((i * 31 + i // 256) % 256 for i in range(n_bytes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "not" / "yet" / "there"


def _only(folder: Path, ending: str) -> Path:
    (file,) = folder.glob(f"*{ending}")
    return file


def test_nothing_is_held_at_first(folder: Path) -> None:
    assert RangeStore(folder).read(PATH, 0, 10) is None
    assert not folder.exists()


def test_what_was_written_is_read_by_another_store(folder: Path) -> None:
    RangeStore(folder).write(PATH, 1000, b"abcdef")

    assert RangeStore(folder).read(PATH, 1000, 1006) == b"abcdef"
    assert RangeStore(folder).read(PATH, 1002, 1004) == b"cd"


def test_a_range_that_is_held_in_part_is_not_held(folder: Path) -> None:
    store = RangeStore(folder)
    store.write(PATH, 1000, b"abcdef")

    assert store.read(PATH, 999, 1006) is None
    assert store.read(PATH, 1000, 1007) is None


def test_ranges_that_touch_or_overlap_are_read_as_one(folder: Path) -> None:
    store, content = RangeStore(folder), _content(400)
    for start, stop in ((100, 200), (200, 250), (240, 400), (0, 90)):
        store.write(PATH, start, content[start:stop])

    assert store.read(PATH, 100, 400) == content[100:400]
    assert store.read(PATH, 150, 390) == content[150:390]
    assert store.read(PATH, 0, 400) is None


def test_an_empty_range_is_always_held(folder: Path) -> None:
    store = RangeStore(folder)
    store.write(PATH, 5, b"")

    assert store.read(PATH, 5, 5) == b""
    assert not folder.exists()


def test_a_long_range_is_checked_in_pieces(folder: Path) -> None:
    store, content = RangeStore(folder), _content(3 * PIECE_BYTES + 5)
    store.write(PATH, 7, content)
    file = _only(folder, ".bytes")
    with file.open("r+b") as stream:
        stream.seek(7 + PIECE_BYTES)
        stream.write(b"!")

    assert store.read(PATH, 7, 7 + PIECE_BYTES) == content[:PIECE_BYTES]
    assert store.read(PATH, 7, 8 + PIECE_BYTES) is None
    assert store.read(PATH, 7 + 2 * PIECE_BYTES, 7 + len(content)) == content[2 * PIECE_BYTES :]


def _flip_a_bit(folder: Path) -> None:
    file = _only(folder, ".bytes")
    content = bytearray(file.read_bytes())
    content[12] ^= 1
    file.write_bytes(content)


def _cut_the_bytes(folder: Path) -> None:
    file = _only(folder, ".bytes")
    file.write_bytes(file.read_bytes()[:15])


def _lose_the_bytes(folder: Path) -> None:
    _only(folder, ".bytes").unlink()


def _cut_the_ledger(folder: Path) -> None:
    file = _only(folder, ".ledger")
    file.write_bytes(file.read_bytes()[:-3])


def _stretch_the_ledger(folder: Path) -> None:
    file = _only(folder, ".ledger")
    file.write_bytes(file.read_bytes().replace(b"10 20 ", b"10 25 "))


def _scramble_the_ledger(folder: Path) -> None:
    _only(folder, ".ledger").write_bytes(b"\xff\x00garbage\n10 20\n")


@pytest.mark.parametrize(
    "damage",
    [_flip_a_bit, _cut_the_bytes, _lose_the_bytes, _cut_the_ledger, _stretch_the_ledger, _scramble_the_ledger],
)
def test_a_damaged_range_is_not_held_until_it_is_written_again(folder: Path, damage: Callable[[Path], None]) -> None:
    store, content = RangeStore(folder), _content(30)
    store.write(PATH, 10, content[10:20])
    damage(folder)

    assert RangeStore(folder).read(PATH, 10, 20) is None

    store.write(PATH, 10, content[10:20])

    assert store.read(PATH, 10, 20) == content[10:20]
    assert RangeStore(folder).read(PATH, 10, 20) == content[10:20]


def test_a_store_sees_what_another_writes_after_its_first_look(folder: Path) -> None:
    first, second = RangeStore(folder), RangeStore(folder)
    first.write(PATH, 0, b"abc")
    assert second.read(PATH, 0, 6) is None
    first.write(PATH, 3, b"def")

    assert second.read(PATH, 0, 6) == b"abcdef"


def test_what_is_forgotten_is_not_held(folder: Path) -> None:
    first, second = RangeStore(folder), RangeStore(folder)
    first.write(PATH, 0, b"abc")
    assert second.read(PATH, 0, 3) == b"abc"
    first.forget(PATH)

    assert first.read(PATH, 0, 3) is None
    assert second.read(PATH, 0, 3) is None
    first.forget(PATH)


@pytest.mark.parametrize("path", ["../../outside", "/etc/passwd", "..", "a/../b", "nul\0byte", "ä" * 300, "x" * 300])
def test_any_path_stays_in_the_folder(folder: Path, path: str) -> None:
    store = RangeStore(folder)
    store.write(path, 0, b"abc")

    assert store.read(path, 0, 3) == b"abc"
    assert len(list(folder.iterdir())) == 2
    assert [file.name for file in folder.parent.iterdir()] == ["there"]


def test_paths_do_not_meet(folder: Path) -> None:
    store = RangeStore(folder)
    paths = ["a/b", "a%2Fb", "a_b", "x" * 300, "x" * 301]
    for number, path in enumerate(paths):
        store.write(path, 0, bytes([number]))

    assert [store.read(path, 0, 1) for path in paths] == [bytes([number]) for number in range(len(paths))]


@settings(max_examples=60, deadline=None)
@given(
    ranges=st.lists(st.tuples(st.integers(0, 120), st.integers(1, 50)), max_size=12),
    asked=st.tuples(st.integers(0, 150), st.integers(1, 60)),
)
def test_exactly_what_is_covered_is_held(
    tmp_path_factory: pytest.TempPathFactory, ranges: list[tuple[int, int]], asked: tuple[int, int]
) -> None:
    content = _content(256)
    store = RangeStore(tmp_path_factory.mktemp("ranges"))
    held = set[int]()
    for start, length in ranges:
        store.write(PATH, start, content[start : start + length])
        held |= set(range(start, start + length))
    start, stop = asked[0], asked[0] + asked[1]

    assert store.read(PATH, start, stop) == (content[start:stop] if held >= set(range(start, stop)) else None)


def test_threads_share_a_store(folder: Path) -> None:
    store, content = RangeStore(folder), _content(64 * 100)

    def one(number: int) -> bytes | None:
        start = number * 100
        store.write(PATH, start, content[start : start + 100])
        return store.read(PATH, start, start + 100)

    with ThreadPoolExecutor(8) as pool:
        read = list(pool.map(one, range(64)))

    assert b"".join(piece or b"" for piece in read) == content
    assert store.read(PATH, 0, len(content)) == content


_WRITE_EACH_THIRD = """
import sys
from pathlib import Path
from streamtap.dataset.ranges import RangeStore

store, first = RangeStore(Path(sys.argv[1])), int(sys.argv[2])
for start in range(first * 50, 9000, 150):
    store.write("file", start, bytes([start // 50]) * 50)
"""


def test_processes_share_a_folder(folder: Path) -> None:
    running = [
        subprocess.Popen([sys.executable, "-c", _WRITE_EACH_THIRD, str(folder), str(number)]) for number in range(3)
    ]
    assert [process.wait(30) for process in running] == [0, 0, 0]

    assert RangeStore(folder).read("file", 0, 9000) == b"".join(bytes([number]) * 50 for number in range(180))
