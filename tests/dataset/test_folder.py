from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from streamtap.dataset import swap
from streamtap.dataset.drafts import Draft, locked
from streamtap.dataset.folder import FolderSource, FolderTarget
from streamtap.dataset.names import CARD, INDEX, SIDECAR, hidden_file
from streamtap.dataset.places import Found
from streamtap.errors import DatasetDamaged, DatasetExists, DatasetNotFound, InvalidInput

SHARD, SECOND = hidden_file(0, 0), hidden_file(0, 1)
OLD = {INDEX: b"old index", CARD: b"old card", SHARD: b"old shard", SECOND: b"old second", SIDECAR: b"{}"}
NEW = {INDEX: b"new index", CARD: b"new card", SHARD: b"new shard"}
OWN = {"notes.txt": b"mine", "code/deep/run.py": b"mine too", "README.txt": b"not the card"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "my-dataset"


@pytest.fixture(params=["exchange", "two renames"])
def _either_swap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "exchange":
        monkeypatch.setattr(swap, "_exchange", lambda one, other: False)


def fill(path: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)


def push(target: FolderTarget, new: Mapping[str, bytes], stale: tuple[str, ...] = ()) -> str:
    found = target.look()
    last: dict[str, Path] = {}
    for name, content in new.items():
        target.room(name).write_bytes(content)
        if name in (INDEX, CARD):
            last[name] = target.room(name)
        else:
            target.put(name, target.room(name))
    assert target.look() == found
    try:
        return target.publish(last, stale, "a push")
    finally:
        target.close()


def held(path: Path) -> dict[str, bytes]:
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def hidden(path: Path) -> list[str]:
    return [file.name for file in path.parent.iterdir() if file.name.startswith(".")]


# To read.


def test_a_folder_is_read_in_place(path: Path) -> None:
    fill(path, OLD)
    source = FolderSource(path)

    assert source.fetch(SHARD) == source.on_disk(SHARD) == source.fetch(SHARD, again=True) == path / SHARD
    assert source.size_bytes(SHARD) == 9
    assert source.read_range(SHARD, 4, 7) == b"sha"
    assert source.read_range(SHARD, 4, 70) == b"shard"
    assert source.read_range(SHARD, 40, 70) == source.read_range(SHARD, 4, 4) == b""
    assert source.read_tail(SHARD, 5) == (b"shard", 9)
    assert source.read_tail(SHARD, 50) == (b"old shard", 9)
    assert source.read_tail(SHARD, 0) == (b"", 9)
    assert source.version is None


def test_what_is_not_there(path: Path) -> None:
    with pytest.raises(DatasetNotFound, match="my-dataset: no such folder"):
        FolderSource(path).fetch(INDEX)
    assert FolderSource(path).on_disk(INDEX) is None
    fill(path, OLD)
    with pytest.raises(DatasetNotFound, match="holds no file tensors/none"):
        FolderSource(path).size_bytes("tensors/none")
    with pytest.raises(DatasetNotFound, match="is not a folder"):
        FolderSource(path / CARD).fetch(INDEX)


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../outside", "tensors/../../outside", "..", "", "a//b", "a\0", "a\\b"]
)
def test_a_path_that_leads_out_is_refused(path: Path, name: str) -> None:
    fill(path, OLD)
    (path.parent / "outside").write_bytes(b"secret")

    with pytest.raises(DatasetDamaged, match="not a path inside"):
        FolderSource(path).fetch(name)
    with pytest.raises(DatasetDamaged, match="not a path inside"):
        FolderTarget(path).room(name)


@pytest.mark.usefixtures("_either_swap")
def test_a_reader_is_told_when_the_dataset_was_replaced(path: Path) -> None:
    fill(path, OLD)
    source = FolderSource(path)
    source.fetch(INDEX)
    push(FolderTarget(path), NEW)

    with pytest.raises(DatasetDamaged, match="was replaced while it was being read"):
        source.fetch(SHARD)
    assert FolderSource(path).fetch(SHARD).read_bytes() == b"new shard"


def test_a_users_home_is_meant_by_a_tilde(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(path.parent))
    push(FolderTarget("~/my-dataset"), NEW)

    assert FolderSource("~/my-dataset").fetch(INDEX) == path / INDEX
    assert FolderSource("~/my-dataset").name == "~/my-dataset"


# To publish.


def test_a_new_folder(path: Path) -> None:
    below = path / "not" / "yet" / "there"
    target = FolderTarget(below)
    assert target.look() is None

    assert push(target, NEW) == str(below)
    assert held(below) == NEW
    assert hidden(below) == []
    assert below.stat().st_mode == below.parent.stat().st_mode


@pytest.mark.usefixtures("_either_swap")
def test_an_old_dataset_is_replaced_and_the_users_files_stay(path: Path) -> None:
    fill(path, {**OLD, **OWN})
    (path / "link").symlink_to("notes.txt")
    (path / "empty").mkdir(mode=0o700)
    path.chmod(0o750)
    target = FolderTarget(path)
    assert target.look() == Found({**{name: len(content) for name, content in (OLD | OWN).items()}, "link": 4})

    push(target, NEW, stale=(SECOND, SIDECAR))

    assert held(path) == {**NEW, **OWN, "link": b"mine"}
    assert (path / "link").is_symlink()
    assert (path / "empty").stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == 0o750
    assert hidden(path) == []


def test_what_is_neither_put_nor_stale_stays(path: Path) -> None:
    fill(path, OLD)
    push(FolderTarget(path), {INDEX: b"upgraded"}, stale=(SIDECAR, "notes.txt"))

    assert held(path) == {name: content for name, content in {**OLD, INDEX: b"upgraded"}.items() if name != SIDECAR}


def test_a_file_of_the_user_is_never_stale(path: Path) -> None:
    fill(path, {**OLD, **OWN})
    push(FolderTarget(path), NEW, stale=(*OWN, SECOND))

    assert held(path) == {**NEW, **OWN, SIDECAR: b"{}"}


def test_files_may_come_from_elsewhere(path: Path, tmp_path: Path) -> None:
    target = FolderTarget(path)
    fill(tmp_path / "elsewhere", {"shard": b"new shard", "index": b"new index"})
    sent: list[int] = []

    target.put(SHARD, tmp_path / "elsewhere" / "shard", advance=sent.append)
    target.publish({INDEX: tmp_path / "elsewhere" / "index"}, (), "a push")

    assert held(path) == {SHARD: b"new shard", INDEX: b"new index"}
    assert sent == [9]


def test_a_link_to_a_folder_stays_a_link(path: Path) -> None:
    fill(path, OLD)
    link = path.with_name("link")
    link.symlink_to(path)
    push(FolderTarget(link), NEW, stale=(SECOND, SIDECAR))

    assert link.is_symlink()
    assert held(path) == NEW


@pytest.mark.usefixtures("_either_swap")
def test_a_file_that_the_user_changes_during_the_swap_stays_changed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(path, {**OLD, **OWN})
    swap_folders = swap.put_in_place

    def edit_first(draft: Path, place: Path, *, replaces: bool) -> Path | None:
        (path / "new-notes").write_bytes(b"later")
        (path / "notes.txt").unlink()
        (path / "notes.txt").write_bytes(b"changed")
        return swap_folders(draft, place, replaces=replaces)

    monkeypatch.setattr("streamtap.dataset.folder.put_in_place", edit_first)
    push(FolderTarget(path), NEW, stale=(SECOND, SIDECAR))

    assert held(path) == {**NEW, **OWN, "notes.txt": b"changed", "new-notes": b"later"}


def test_without_hard_links_the_users_files_are_copied(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    fill(path, {**OLD, **OWN})
    push(FolderTarget(path), NEW, stale=(SECOND, SIDECAR))

    assert held(path) == {**NEW, **OWN}


@pytest.mark.parametrize("old", [OLD, {}], ids=["replaced", "created"])
def test_two_pushes_at_once(path: Path, old: dict[str, bytes]) -> None:
    fill(path, old)
    first, second = FolderTarget(path), FolderTarget(path)
    second.look()
    second.room(INDEX).write_bytes(b"second")
    push(first, NEW, stale=(SECOND, SIDECAR))

    with pytest.raises(DatasetExists, match="somebody else published to .*my-dataset"):
        second.publish({INDEX: second.room(INDEX)}, (), "a push")
    second.close()

    assert held(path) == NEW
    assert hidden(path) == []


def test_a_folder_that_appears_at_the_last_moment_is_not_touched(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = FolderTarget(path)
    monkeypatch.setattr("streamtap.dataset.folder.sync_folder", lambda _: fill(path, OWN))

    with pytest.raises(DatasetExists):
        push(target, NEW)

    assert held(path) == OWN
    assert hidden(path) == []


def test_closing_without_publishing_leaves_nothing(path: Path) -> None:
    fill(path, OLD)
    target = FolderTarget(path)
    target.room(SHARD).write_bytes(b"x")
    target.put(SHARD, target.room(SHARD))
    assert len(hidden(path)) == 1
    target.close()
    target.close()

    assert hidden(path) == []
    assert held(path) == OLD


def test_places_that_cannot_be_replaced(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(path, OLD)
    with pytest.raises(InvalidInput, match="is a file"):
        FolderTarget(path / CARD)
    monkeypatch.chdir(path / "index")
    for place in (".", "..", path, "/"):
        with pytest.raises(InvalidInput, match="name a folder inside it"):
            FolderTarget(place)
    assert FolderTarget("inner").look() is None


def test_drafts_of_the_living_stay_and_those_of_the_dead_go(path: Path) -> None:
    script = "from streamtap.dataset.drafts import Draft; Draft(__import__('pathlib').Path('.'), 'my-dataset'); input()"
    other = subprocess.Popen([sys.executable, "-c", script], cwd=path.parent, stdin=subprocess.PIPE)
    while not hidden(path):
        assert other.poll() is None
    (theirs,) = hidden(path)
    kept, file = path.with_name(".my-dataset.1.part"), path.with_name(".my-dataset.1.01234567.part")
    kept.mkdir()
    file.write_bytes(b"no draft")
    # It is made and locked under the lock of the folder.
    with locked(path.parent):
        pass
    Draft(path.parent, "my-dataset").close()
    assert sorted(hidden(path)) == sorted([theirs, kept.name, file.name])

    other.kill()
    other.wait()
    Draft(path.parent, "my-dataset").close()

    assert sorted(hidden(path)) == sorted([kept.name, file.name])


def test_readers_beside_a_writer_see_whole_datasets(path: Path) -> None:
    versions = [{INDEX: b"%d" % number, SHARD: b"%d" % number} for number in range(40)]
    push(FolderTarget(path), versions[0])
    seen: list[bytes] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            source = FolderSource(path)
            try:
                index, shard = source.read_range(INDEX, 0, 9), source.read_range(SHARD, 0, 9)
                source.size_bytes(INDEX)
            except DatasetDamaged:
                continue
            assert index == shard
            seen.append(index)

    reader = threading.Thread(target=read)
    reader.start()
    for version in versions[1:]:
        push(FolderTarget(path), version)
    done.set()
    reader.join()

    assert FolderSource(path).read_range(SHARD, 0, 9) == b"39"
    assert seen


_KILLED_AT_EACH_STEP = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import test_folder as t
from streamtap.dataset import swap

# A killed process loses nothing that it handed to the system.
os.fsync = lambda fd: None
folder, step, code = Path(sys.argv[2]), 0, None
if sys.argv[3] != "exchange":
    swap._exchange = lambda one, other: False
while code != 0:
    path = folder / str(step) / "my-dataset"
    t.fill(path, {**t.OLD, **t.OWN})
    pid = os.fork()
    if pid == 0:
        left = step + 1
        def count(event, _):
            global left
            left -= event.startswith(("open", "fcntl.", "ctypes.dl", "os.", "shutil.")) and event != "os.scandir"
            # The kill is an event too.
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(count)
        t.push(t.FolderTarget(path), t.NEW, (t.SECOND, t.SIDECAR))
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -signal.SIGKILL), code
    root = t.FolderSource(path).fetch(t.INDEX).parent.parent
    old, new = {**t.OLD, **t.OWN}, {**t.NEW, **t.OWN}
    found = t.held(root)
    assert found in (old, new), (step, found)
    t.push(t.FolderTarget(path), t.NEW, (t.SECOND, t.SIDECAR))
    assert t.held(path) == new and t.hidden(path) == [], (step, t.held(path), t.hidden(path))
    print("old" if found == old else "new", "aside" if root != path else "")
    step += 1
"""


@pytest.mark.parametrize("kind", ["exchange", "two renames"])
def test_a_push_that_is_killed_between_any_two_steps_leaves_a_whole_dataset(tmp_path: Path, kind: str) -> None:
    command = [sys.executable, "-c", _KILLED_AT_EACH_STEP, str(Path(__file__).parent), str(tmp_path), kind]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100)

    assert ran.returncode == 0, ran.stderr
    versions = [line.split() for line in ran.stdout.splitlines()]
    assert len(versions) > 50
    assert versions[0][0] == "old"
    assert versions[-1][0] == "new"
    assert sorted(versions, key=lambda line: line[0], reverse=True) == versions
    assert ["old", "aside"] in versions or kind == "exchange"
