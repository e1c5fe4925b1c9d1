"""A run is brought to a folder whole, or it is not there."""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamtap.errors import HarvestDamaged, HarvestMismatch, NotEnoughSpace
from streamtap.harvested import fetching
from streamtap.harvested.fetching import fetch_run
from streamtap.harvested.reader import HarvestedRun

Make = Callable[..., Any]


class _Place:
    """A place that another one stands behind, with something in between."""

    def __init__(self, place: Any, between: Callable[[str, int, bytes], bytes]) -> None:
        self._place, self._between, self.url = place, between, place.url

    def get(self, name: str) -> bytes:
        return self._between(name, 0, self._place.get(name))

    def get_range(self, name: str, start: int, stop: int) -> bytes:
        return self._between(name, start, self._place.get_range(name, start, stop))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "_PIECE_BYTES", 100)


@pytest.fixture(scope="module")
def made(make_run: Make) -> Any:
    return make_run(shard_size=2)


def test_a_file_that_breaks_off_goes_on_at_its_piece(made: Any, counted: Make, tmp_path: Path) -> None:
    def breaking(name: str, start: int, data: bytes) -> bytes:
        if name == "shard_00001.safetensors" and start >= 200:
            raise FileNotFoundError(name)
        return data

    place = counted(made.folder)
    with pytest.raises(HarvestDamaged, match="shard_00001.safetensors of s3://far/away is missing"):
        fetch_run(_Place(place, breaking), tmp_path)
    assert (tmp_path / ".shard_00001.safetensors.fetched").stat().st_size == 200

    place.asked.clear()
    fetch_run(place, tmp_path)
    assert min(start for name, start, _ in place.asked if name == "shard_00001.safetensors") == 200
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    HarvestedRun.open(tmp_path).verify()


def test_what_another_run_left_behind_is_fetched_anew(made: Any, counted: Make, tmp_path: Path) -> None:
    (tmp_path / ".shard_00000.safetensors.fetched").write_bytes(b"x" * 300)
    (tmp_path / ".shard_00001.safetensors.fetched").write_bytes(b"x" * 1_000_000)
    (tmp_path / "shard_00002.safetensors").write_bytes(b"x" * (made.folder / "shard_00002.safetensors").stat().st_size)

    fetch_run(counted(made.folder), tmp_path)

    HarvestedRun.open(tmp_path).verify()


def test_bytes_that_were_spoilt_on_the_way_are_fetched_once_more(made: Any, counted: Make, tmp_path: Path) -> None:
    spoilt: list[str] = []

    def between(name: str, start: int, data: bytes) -> bytes:
        if name.startswith("shard_00003") and start == 100 and not spoilt:
            spoilt.append(name)
            return bytes(len(data))
        return data

    fetch_run(_Place(counted(made.folder), between), tmp_path)

    assert spoilt
    HarvestedRun.open(tmp_path).verify()


def test_a_file_that_ends_early_is_damaged(made: Any, counted: Make, tmp_path: Path) -> None:
    def ending(name: str, start: int, data: bytes) -> bytes:
        return b"" if name.startswith("shard_00002") and start >= 100 else data

    with pytest.raises(HarvestDamaged, match="shard_00002.safetensors of s3://far/away ends after 100 bytes"):
        fetch_run(_Place(counted(made.folder), ending), tmp_path)


def test_the_manifest_comes_last(made: Any, counted: Make, tmp_path: Path) -> None:
    def between(name: str, _start: int, data: bytes) -> bytes:
        if name == "stats.safetensors":
            assert len(list(tmp_path.glob("shard_*"))) == 6
            raise FileNotFoundError(name)
        return data

    with pytest.raises(HarvestDamaged, match="stats.safetensors"):
        fetch_run(_Place(counted(made.folder), between), tmp_path)
    assert not (tmp_path / "manifest.json").exists()


def test_a_place_without_a_whole_run_is_refused(counted: Make, tmp_path: Path) -> None:
    with pytest.raises(HarvestDamaged, match="manifest.json of s3://far/away is missing"):
        fetch_run(counted(tmp_path / "nothing"), tmp_path / "here")
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize("text", ['{"run_id": "other"}', "damaged", "[]"])
@pytest.mark.parametrize("name", ["manifest.json", "run.json"])
def test_a_folder_of_something_else_is_left_alone(
    made: Any, counted: Make, tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / name).write_text(text)

    with pytest.raises(HarvestMismatch, match="name another folder"):
        fetch_run(counted(made.folder), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_two_do_not_fetch_into_one_folder(made: Any, counted: Make, tmp_path: Path) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def between(name: str, _start: int, data: bytes) -> bytes:
        if name.startswith("shard_"):
            begun.set()
            assert go_on.wait(10)
        return data

    first = threading.Thread(target=fetch_run, args=(_Place(counted(made.folder), between), tmp_path))
    first.start()
    assert begun.wait(10)
    with pytest.raises(HarvestMismatch, match="another process downloads into"):
        fetch_run(counted(made.folder), tmp_path)
    go_on.set()
    first.join()
    HarvestedRun.open(tmp_path).verify()


def test_a_disk_that_is_too_small_is_seen_beforehand(
    made: Any, counted: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: free)

    with pytest.raises(NotEnoughSpace, match=r"has \d+ bytes to bring, and .* has room for 1000"):
        fetch_run(counted(made.folder), tmp_path)
    assert list(tmp_path.glob("*shard*")) == []


def test_a_disk_that_fills_up_is_said_to_be_full(
    made: Any, counted: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(fetching, "_write_all", full)
        with pytest.raises(NotEnoughSpace, match=r"is full \(No space left on device\)"):
            fetch_run(counted(made.folder), tmp_path)

    fetch_run(counted(made.folder), tmp_path)
    HarvestedRun.open(tmp_path).verify()
