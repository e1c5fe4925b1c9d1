"""A push is one visible change: the same again sends nothing, and what fails leaves what was."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from streamtap.dataset import packing
from streamtap.dataset.checked import CheckedFiles
from streamtap.dataset.contents import make_plan, packed_bytes
from streamtap.dataset.folder import FolderSource, FolderTarget
from streamtap.dataset.names import CARD, SIDECAR, STAGE_MARK
from streamtap.dataset.reader import Dataset
from streamtap.dataset.writer import public_name, publish, work_bytes
from streamtap.errors import DatasetExists, InvalidInput, NotEnoughSpace, TransferFailed

Make = Callable[..., Any]


def read(folder: Path) -> Dataset:
    return Dataset(FolderSource(folder), CheckedFiles(folder.parent / "checked"))


def same(left: Any, right: Any) -> bool:
    return bool(left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes())


def test_the_same_again_sends_nothing(make: Make, recording: Make) -> None:
    made = make(5)
    publish(made.contents, recording())
    again = recording()

    assert publish(make(5).contents, again) == again.url
    assert again.calls == []
    assert again.closed
    assert again.most_files == 0


def test_a_damaged_copy_of_the_same_is_sent_again(make: Make, recording: Make, check_files: Make) -> None:
    first = recording()
    publish(make(5).contents, first)
    next((first.place / "tensors").iterdir()).write_bytes(b"cut")
    with pytest.raises(DatasetExists):
        publish(make(5).contents, recording())
    mended = recording()
    publish(make(5).contents, mended, exist_ok=True)

    assert mended.calls[-1] == "publish"
    check_files(mended.place)


def test_a_flipped_byte_is_mended_by_pushing_the_same_with_exist_ok(
    make: Make, tmp_path: Path, check_files: Make
) -> None:
    place = tmp_path / "set"
    publish(make(5).contents, FolderTarget(place))
    shard = next((place / "tensors").iterdir())
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x7f")
    publish(make(5).contents, FolderTarget(place), exist_ok=True)

    check_files(place)


def test_what_the_place_says_of_its_files_is_compared(make: Make, recording: Make) -> None:
    publish(make(5).contents, recording())
    path = next(path for path in recording().look().files if path.startswith("tensors/"))
    other = recording(sums={path: "0" * 64})
    with pytest.raises(DatasetExists):
        publish(make(5).contents, other)
    assert other.calls == []


def test_what_does_not_fit_the_disk_is_refused_before_any_work(
    make: Make, recording: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _path: SimpleNamespace(free=10))
    target = recording()
    with pytest.raises(NotEnoughSpace, match="takes .* are free. stream=True"):
        publish(make(5).contents, target)
    assert target.calls == []
    publish(make(5).contents, recording(), stream=True)


def test_progress_counts_packing_and_sending(make: Make, recording: Make) -> None:
    contents, target = make(5).contents, recording()
    told: list[int] = []
    publish(contents, target, advance=told.append)

    files = list(target.place.rglob("*.safetensors"))
    packed = packed_bytes(contents, make_plan(contents))
    assert sum(told) == packed + sum(file.stat().st_size for file in files)
    assert work_bytes(contents, make_plan(contents), target) == 2 * packed


@pytest.mark.parametrize("seed", [1], ids=["other rows"])
def test_something_else_is_refused_before_any_work(seed: int, make: Make, recording: Make) -> None:
    publish(make(5).contents, recording())
    target, made = recording(), make(5, seed=seed)

    def never(*_: Any) -> Any:
        raise AssertionError("rows were read")

    contents = replace(made.contents, hidden=replace(made.contents.hidden, read=never))
    with pytest.raises(DatasetExists, match="user/set holds 4 files of something else.*exist_ok=True"):
        publish(contents, target)
    assert target.calls == []
    assert target.closed


def test_the_hubs_own_file_is_not_something_else(make: Make, recording: Make) -> None:
    target = recording()
    target.place.mkdir()
    (target.place / ".gitattributes").write_text("*.safetensors filter=lfs")
    publish(make(5).contents, target)

    assert (target.place / ".gitattributes").exists()


@pytest.mark.parametrize("kind", ["folder", "recording"])
def test_replacing_removes_stale_files_of_the_format_alone(
    kind: str, make: Make, recording: Make, check_files: Make, tmp_path: Path
) -> None:
    folder = tmp_path / "place"

    def target() -> Any:
        return FolderTarget(folder) if kind == "folder" else recording()

    publish(make(9, layers=[0, 1]).contents, target(), shard_max_bytes=32)
    own = {"notes.md": "mine", "code/run.py": "mine", ".gitattributes": "text"}
    for path, text in {**own, SIDECAR: "{}", STAGE_MARK: ""}.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)
    if kind == "recording":
        shutil.rmtree(recording().sent)
    publish(make(3, layers=[1, 2], seed=1).contents, target(), exist_ok=True)
    for path, text in own.items():
        assert (folder / path).read_text() == text
        (folder / path).unlink()

    ours = check_files(folder)
    assert sorted(ours["files"]) == [f"tensors/hidden_layer00{layer}_shard000.safetensors" for layer in (1, 2)]


@pytest.mark.parametrize("stream", [False, True], ids=["packed first", "streamed"])
@pytest.mark.parametrize("old", [False, True], ids=["new", "replacing"])
@pytest.mark.usefixtures("no_thread_left")
def test_a_failure_at_each_call_leaves_what_was_and_the_next_push_completes(
    stream: bool, old: bool, make: Make, recording: Make, check_files: Make
) -> None:
    before = make(5, seed=9)
    if old:
        publish(before.contents, recording())
    contents = make(9, k=2, seed=1).contents
    n_calls = 2 * 3 + 3 + 1
    for fail_at in range(n_calls):
        target = recording(fail_at=fail_at)
        with pytest.raises(TransferFailed):
            publish(contents, target, shard_max_bytes=48, exist_ok=old, stream=stream)
        assert len(target.calls) == fail_at + 1
        assert target.closed
        assert not target.rooms.exists()
        if old:
            dataset = read(target.place)
            assert same(dataset.read_layer(0, dataset.index.places()), before.rows[0])
        else:
            assert not target.place.exists()
    last = recording()
    publish(contents, last, shard_max_bytes=48, exist_ok=old, stream=stream)

    assert len(last.calls) == n_calls
    assert len(set(last.calls)) == n_calls
    check_files(last.place)


@pytest.mark.parametrize("counts", [None, [4, 1, 6, 2, 1, 5] * 4], ids=["pooled", "full sequence"])
@pytest.mark.usefixtures("no_thread_left")
def test_streaming_keeps_three_shards_at_most_on_this_machine(counts: Any, make: Make, recording: Make) -> None:
    contents = make(40, counts=counts, layers=[0, 1], k=2).contents
    streamed, packed = recording(seconds=0.002), recording()
    publish(contents, streamed, shard_max_bytes=64, stream=True)
    n_files = len(streamed.calls) - 1
    publish(make(40, counts=counts, layers=[0, 1], k=2, seed=1).contents, packed, shard_max_bytes=64, exist_ok=True)

    assert n_files > 20
    assert streamed.most_files <= 3
    assert packed.most_files == n_files


@pytest.mark.usefixtures("no_thread_left")
def test_an_error_while_reading_rows_ends_everything(make: Make, recording: Make) -> None:
    made, target = make(40), recording()

    def fails(layer: int, start: int, stop: int) -> Any:
        if layer == 3:
            raise OSError("the disk is gone")
        return made.rows[layer][start:stop]

    contents = replace(made.contents, hidden=replace(made.contents.hidden, read=fails))
    with pytest.raises(OSError, match="the disk is gone"):
        publish(contents, target, shard_max_bytes=64, stream=True)
    assert "publish" not in target.calls
    assert not target.rooms.exists()


WRONG_ROWS = {
    "fewer rows": lambda rows: rows[:-1],
    "more rows": lambda rows: np.concatenate([rows, rows[:1]]),
    "wider rows": lambda rows: np.concatenate([rows, rows], axis=1),
    "one number a row": lambda rows: rows[:, 0],
    "another dtype": lambda rows: rows.astype(np.float64),
}


@pytest.mark.parametrize("counts", [None, [2, 1, 3]], ids=["pooled", "full sequence"])
@pytest.mark.parametrize("wrong", list(WRONG_ROWS))
@pytest.mark.usefixtures("no_thread_left")
def test_rows_that_were_not_announced_are_never_published(wrong: str, counts: Any, make: Make, recording: Make) -> None:
    made, target = make(3, counts=counts), recording()
    hidden = made.contents.hidden
    contents = replace(
        made.contents, hidden=replace(hidden, read=lambda *where: WRONG_ROWS[wrong](hidden.read(*where)))
    )
    with pytest.raises(InvalidInput, match=r"layer 0 of prompts 0 to 2 must be|the next rows of this shard are"):
        publish(contents, target)
    assert "publish" not in target.calls


@pytest.mark.parametrize("part", [0, 1], ids=["values", "ids"])
@pytest.mark.usefixtures("no_thread_left")
def test_logits_that_were_not_announced_are_never_published(part: int, make: Make, recording: Make) -> None:
    made, target = make(3, k=2), recording()
    whole = list(made.logits)
    whole[part] = whole[part][:2]
    contents = replace(made.contents, logits=replace(made.contents.logits, read=lambda start, stop: tuple(whole)))
    with pytest.raises(InvalidInput):
        publish(contents, target)
    assert "publish" not in target.calls
    assert not target.rooms.exists()


def test_logits_are_read_in_blocks(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_BLOCK_BYTES", 64)
    made, asked = make(20, layers=(), k=2), []

    def noted(start: int, stop: int) -> Any:
        asked.append(stop - start)
        return made.logits[0][start:stop], made.logits[1][start:stop]

    contents = replace(made.contents, logits=replace(made.contents.logits, read=noted))
    publish(contents, FolderTarget(tmp_path / "set"))

    assert max(asked) == 4
    dataset = read(tmp_path / "set")
    assert same(dataset.read_logits(dataset.index.logit_places())[1], made.logits[1])


@pytest.mark.parametrize(
    ("name", "public"),
    [
        ("user/name", "user/name"),
        ("./my-set", "./my-set"),
        ("/home/somebody/my-set", "./my-set"),
        ("../sets/my-set", "./my-set"),
        ("~/my-set", "./my-set"),
        ("s3://bucket/my-set", "s3://bucket/my-set"),
    ],
)
def test_a_strangers_name_of_a_dataset(name: str, public: str) -> None:
    assert public_name(name) == public


def test_the_card_does_not_say_where_a_folder_lies(make: Make, tmp_path: Path) -> None:
    publish(make(3).contents, FolderTarget(tmp_path / "set"))

    assert str(tmp_path) not in (tmp_path / "set" / CARD).read_text()
    assert "load_activations('./set'" in (tmp_path / "set" / CARD).read_text()
