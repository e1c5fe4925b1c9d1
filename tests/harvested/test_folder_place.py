"""A file is whole and durable under its name, or not there."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from streamtap.errors import InvalidInput, NotEnoughSpace
from streamtap.harvested.folder_place import FolderPlace


@pytest.fixture
def place(tmp_path: Path) -> FolderPlace:
    return FolderPlace(tmp_path / "deep" / "run")


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    file = tmp_path / "spool" / "shard_00000.safetensors"
    file.parent.mkdir()
    file.write_bytes(b"rows" * 1000)
    return file


def test_nothing_is_made_by_looking(place: FolderPlace) -> None:
    assert place.names() == set()
    assert place.size("x") is None
    place.delete("x")
    for ask in (lambda: place.get("x"), lambda: place.get_range("x", 0, 1)):
        with pytest.raises(FileNotFoundError):
            ask()  # type: ignore[no-untyped-call]
    assert not place.folder.exists()


def test_what_is_put_is_there(place: FolderPlace) -> None:
    place.put("run.json", b"0123456789")
    place.put("run.json", b"01234")
    place.put("empty", b"")

    assert place.get("run.json") == b"01234"
    assert place.size("run.json") == 5
    assert place.size("empty") == 0
    assert place.names() == {"run.json", "empty"}
    assert place.url == str(place.folder)
    place.delete("run.json")
    place.delete("run.json")
    assert place.names() == {"empty"}


def test_ranges(place: FolderPlace) -> None:
    place.put("x", b"0123456789")

    assert place.get_range("x", 2, 5) == b"234"
    assert place.get_range("x", 8, 1 << 60) == b"89"
    assert place.get_range("x", 10, 12) == place.get_range("x", 5, 5) == place.get_range("x", 50, 60) == b""


def test_a_file_of_this_disk_is_moved_once_it_is_durable(
    place: FolderPlace, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number, done = finished.stat().st_ino, []
    sync = os.fsync

    def fsync(fd: int) -> None:
        done.append(("sync", os.fstat(fd).st_ino))
        sync(fd)

    def replace(path: Path, target: Path) -> Path:
        done.append(("move", path.stat().st_ino))
        os.replace(path, target)
        return target

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", replace)
    place.put_file("shard_00000.safetensors", finished, sha256="")

    assert not finished.exists()
    assert place.path("shard_00000.safetensors").stat().st_ino == number
    assert done == [("sync", number), ("move", number), ("sync", place.folder.stat().st_ino)]


def test_a_file_of_another_disk_is_copied(place: FolderPlace, finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _on_another_disk(finished, monkeypatch)
    place.put("shard_00000.safetensors", b"older")
    place.put_file("shard_00000.safetensors", finished, sha256="")

    assert not finished.exists()
    assert place.get("shard_00000.safetensors") == b"rows" * 1000
    assert [file.name for file in place.folder.iterdir()] == ["shard_00000.safetensors"]


def _on_another_disk(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = Path.replace

    def refused(path: Path, target: Path) -> Path:
        if path == file:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", refused)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk(place: FolderPlace, finished: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    place.put("x", b"old")
    _on_another_disk(finished, monkeypatch)

    def full(_fd: int) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(NotEnoughSpace, match="no room for x.*free some space and run the same command again"):
            place.put("x", b"new")
        for _ in range(2):
            with pytest.raises(NotEnoughSpace, match="no room for shard_0"):
                place.put_file("shard_0", finished, sha256="")
    # What was not taken is where it was, and goes through once there is room.
    assert finished.exists()
    assert [file.name for file in place.folder.iterdir()] == ["x"]
    assert place.get("x") == b"old"
    place.put_file("shard_0", finished, sha256="")
    assert place.get("shard_0") == b"rows" * 1000


def test_other_errors_stay_what_they_are(place: FolderPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="put/output error") as caught:
        place.put("x", b"")
    assert caught.value.errno == errno.EIO
    assert place.names() == set()


def test_a_place_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")

    with pytest.raises(InvalidInput, match="is a file; a run needs a folder"):
        FolderPlace(tmp_path / "file")
    with pytest.raises(InvalidInput, match="cannot be written to.*name a folder of yours"):
        FolderPlace(tmp_path / "file" / "run").put("x", b"")


def test_a_place_is_looked_at_before_anything_is_made(
    place: FolderPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    before = sorted(tmp_path.rglob("*"))

    place.check()
    with pytest.raises(InvalidInput, match=r"run cannot be written to \(.*file is a file\); name a folder of yours"):
        FolderPlace(tmp_path / "file" / "run").check()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(InvalidInput, match=r"run cannot be written to \(.* takes no files of this user\)"):
        FolderPlace(tmp_path / "new" / "run").check()

    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/etc/passwd", ".x.part", "a\0b", "a\nb", "ä"])
def test_a_name_that_leads_elsewhere_is_refused(place: FolderPlace, finished: Path, name: str) -> None:
    asks: list[Any] = [place.get, place.size, place.delete, lambda name: place.put(name, b"")]
    asks += [lambda name: place.get_range(name, 0, 1), lambda name: place.put_file(name, finished, sha256="")]
    for ask in asks:
        with pytest.raises(InvalidInput, match="a file of a run is named like"):
            ask(name)
    assert finished.exists()


def test_several_writers_of_one_name(place: FolderPlace) -> None:
    contents = [bytes([65 + number]) * (100_000 + number) for number in range(8)]
    place.put("x", contents[0])
    torn: list[bytes] = []

    def write(content: bytes) -> None:
        for _ in range(5):
            place.put("x", content)
            if (found := place.get("x")) not in contents:
                torn.append(found)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, contents))

    assert torn == []
    assert [file.name for file in place.folder.iterdir()] == ["x"]


def test_a_writer_that_is_killed_leaves_what_was_there(tmp_path: Path) -> None:
    place = FolderPlace(tmp_path / "run")
    code = (
        "import sys; from streamtap.harvested.folder_place import FolderPlace; place = FolderPlace(sys.argv[1])\n"
        "for number in range(1 << 30): place.put('x', bytes([number % 256]) * 1_000_000)"
    )
    for _ in range(3):
        writer = subprocess.Popen([sys.executable, "-c", code, str(place.folder)])
        deadline = time.monotonic() + 30
        while place.size("x") is None and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        found = place.get("x")
        assert len(found) == 1_000_000
        assert len(set(found)) == 1
    # What the killed ones left hinders nobody, is no file of the run, and goes.
    assert place.names() == {"x"}
    place.put("x", b"last")
    assert [file.name for file in place.folder.iterdir()] == ["x"]
