"""The disk on which shards are put together: full, broken, or without what it had been given."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from streamtap.errors import NotEnoughSpace, TransferFailed
from streamtap.harvest import sealing, shard_making
from streamtap.harvest.asked import HarvestAsk
from streamtap.harvest.plan import read_prompts
from streamtap.harvest.run import run_harvest
from streamtap.harvested import shard_file
from streamtap.harvested.folder_place import FolderPlace
from streamtap.harvested.manifest import HarvestManifest
from streamtap.harvested.reader import HarvestedRun
from streamtap.testing.fake_engine import FakeEngine

SHARD = 8
PROMPTS = [f"prompt {i} {'x' * (i * 7 % 23)}" for i in range(43)]
ASK = HarvestAsk(layers=[1, 3], shard_size=SHARD)


def harvest(
    folder: Path,
    *,
    place: Any = None,
    engine: FakeEngine | None = None,
    ask: HarvestAsk = ASK,
) -> HarvestManifest:
    engine = engine or FakeEngine()
    tokens = read_prompts(PROMPTS, engine.tokenizer)
    place = place or FolderPlace(folder)
    return run_harvest(engine, tokens, place, ask, spool=folder / ".spool", run_id="run")


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("undisturbed")
    harvest(folder)
    return files(folder)


def repeated(engines: Sequence[FakeEngine]) -> int:
    counts = Counter(run.token_ids for engine in engines for run in engine.runs)
    assert len(counts) == len(PROMPTS)
    return sum(counts.values()) - len(counts)


class Gone(FolderPlace):
    """Takes no shard."""

    def put_file(self, name: str, file: Path, *, sha256: str) -> None:
        raise TransferFailed(f"the store failed for {name}")


def test_a_full_disk_is_said_and_the_run_goes_on_once_there_is_room(
    tmp_path: Path, undisturbed: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = [FakeEngine(), FakeEngine()]
    room = [2]

    def reserve(fd: int, start: int, length: int) -> None:
        room[0] -= 1
        if room[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(shard_file.os, "posix_fallocate", reserve)
        with pytest.raises(NotEnoughSpace, match=r"free some space and run the same command again"):
            harvest(tmp_path, engine=engines[0])
    assert len(engines[0].runs) == 2 * SHARD
    assert not list(tmp_path.rglob("*.part"))

    harvest(tmp_path, engine=engines[1])
    assert repeated(engines) == 0
    assert files(tmp_path) == undisturbed


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("where", ["rows", "packing", "record"])
def test_a_disk_that_fills_up_in_the_middle_is_said_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, number: int
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(number, os.strerror(number))

    ask = HarvestAsk(layers=[1, 3], shard_size=SHARD, compression="zstd" if where == "packing" else "none")
    with monkeypatch.context() as patch:
        if where == "rows":
            patch.setattr(shard_file.os, "pwritev", full)
        elif where == "packing":
            patch.setattr(sealing, "compress_file", full)
        else:
            patch.setattr(Path, "write_bytes", full)
        with pytest.raises(NotEnoughSpace, match="free some space and run the same command"):
            harvest(tmp_path, ask=ask)

    assert harvest(tmp_path, ask=ask).n_prompts == len(PROMPTS)
    HarvestedRun.open(tmp_path).verify()


def test_an_error_of_the_disk_that_is_no_lack_of_room_stays_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(shard_file.os, "pwritev", broken)
    with pytest.raises(OSError, match="Input/output error") as caught:
        harvest(tmp_path)
    assert not isinstance(caught.value, NotEnoughSpace)


@pytest.mark.parametrize("damage", [b"", b"\x00" * 400, b"{}"])
def test_a_spool_that_lost_its_bytes_costs_its_shard(
    tmp_path: Path, undisturbed: dict[str, bytes], damage: bytes
) -> None:
    for what in ("whole", "shard"):
        folder = tmp_path / what
        engines = [FakeEngine(), FakeEngine()]
        with pytest.raises(TransferFailed):
            harvest(folder, place=Gone(folder), engine=engines[0])
        spooled = sorted((folder / ".spool" / "run").glob(f"{what}_*"))
        assert spooled
        spooled[0].write_bytes(damage)
        harvest(folder, engine=engines[1])

        assert repeated(engines) == SHARD
        assert files(folder) == undisturbed


@pytest.mark.parametrize(("boot", "lost"), [("the next one", SHARD), ("", SHARD), (None, 0)])
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_what_was_not_hashed_is_believed_until_the_machine_is_started_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compression: Any, boot: str | None, lost: int
) -> None:
    """A process that is killed loses no byte that it wrote; a machine without power may."""

    def killed(record: Any, _folder: Path) -> Any:
        raise RuntimeError(f"killed at {record.number}")

    ask = HarvestAsk(layers=[1, 3], shard_size=SHARD, compression=compression)
    engines = [FakeEngine(), FakeEngine()]
    with monkeypatch.context() as patch:
        patch.setattr(shard_making, "seal", killed)
        with pytest.raises(RuntimeError, match="killed at"):
            harvest(tmp_path, engine=engines[0], ask=ask)
    spooled = len(list((tmp_path / ".spool" / "run").glob("whole_*")))
    if boot is not None:
        monkeypatch.setattr(shard_making, "this_boot", lambda: boot)
    harvest(tmp_path, engine=engines[1], ask=ask)

    assert spooled >= 1
    assert repeated(engines) == lost * spooled
    HarvestedRun.open(tmp_path).verify()
    assert not list((tmp_path / ".spool").glob("run"))


def test_a_spool_of_another_run_is_not_taken(tmp_path: Path) -> None:
    """The same prompts, other layers, and the first run's folder was removed: its spool is no part of the second."""
    spool = tmp_path / "spool"
    one = FolderPlace(tmp_path / "one")
    with pytest.raises(TransferFailed):
        run_harvest(
            FakeEngine(),
            read_prompts(PROMPTS, FakeEngine().tokenizer),
            Gone(one.folder),
            ASK,
            spool=spool,
        )
    (one.folder / "run.json").unlink()
    other = HarvestAsk(layers=[0], shard_size=SHARD)
    run_harvest(FakeEngine(), read_prompts(PROMPTS, FakeEngine().tokenizer), one, other, spool=spool)

    found = HarvestedRun.open(one)
    assert found.layers == (0,)
    assert found.prompt(3)[0].shape[1] == 8
    found.verify()
