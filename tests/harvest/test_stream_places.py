"""Streams of runs that lie elsewhere, are several, or are damaged."""

from __future__ import annotations

import copy
import multiprocessing
import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from streamtap.errors import HarvestDamaged, TransferFailed, Unsupported
from streamtap.harvest.stream import ActivationStream
from streamtap.harvested.folder_place import FolderPlace
from streamtap.harvested.joined import JoinedRuns
from streamtap.harvested.linked_place import LinkedPlace
from streamtap.harvested.opening import open_place
from streamtap.harvested.reader import HarvestedRun

TEXTS = [f"{chr(33 + i)}{'and so on'[: i % 9]}" for i in range(90)]
SMALL: dict[str, Any] = {"batch_rows": 16, "shuffle_rows": 128}


def rows_of(batches: Iterable[torch.Tensor]) -> list[bytes]:
    return [row.numpy().tobytes() for batch in batches for row in batch]


def expected(run: HarvestedRun | JoinedRuns, layer: int) -> Counter[bytes]:
    return Counter(row.tobytes() for row in run.activations(layers=layer).acts[layer])


def test_runs_of_several_jobs_are_one_stream(harvest: Any, tmp_path: Path) -> None:
    parts = [harvest(tmp_path / name, prompts) for name, prompts in (("a", TEXTS[:40]), ("b", TEXTS[40:]))]
    joined = JoinedRuns(parts)
    stream = ActivationStream(joined, layers=[1], normalise=False, **SMALL)

    assert Counter(rows_of(stream)) == expected(joined, 1)
    loader = DataLoader(stream, batch_size=None, num_workers=2, multiprocessing_context="spawn")
    assert Counter(rows_of(loader)) == expected(joined, 1)
    whole = torch.cat(list(ActivationStream(joined, layers=[1], normalise=True, drop_special=True, **SMALL)))
    assert whole.mean(0).abs().max() < 0.02


def test_a_damaged_file_is_told(runs: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(runs().place.url, tmp_path / "run"))
    (folder / "shard_00003.safetensors").unlink()
    stream = ActivationStream(folder, **SMALL)
    with pytest.raises(HarvestDamaged, match="shard_00003"):
        list(stream)


class _Linked:
    """A server of a run's files that counts, and may fail."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.fails = folder, False
        self.asked: list[str] = []

    def place(self) -> LinkedPlace:
        links = {file.name: f"https://store/{file.name}" for file in self.folder.iterdir() if file.is_file()}
        return LinkedPlace(links, self.get, lambda: links)

    def get(self, link: str, headers: Any) -> tuple[int, bytes]:
        if self.fails:
            raise TransferFailed("the store is away.")
        name = link.rpartition("/")[2]
        self.asked.append(name)
        data = (self.folder / name).read_bytes()
        if "Range" not in headers:
            return 200, data
        start, stop = headers["Range"].removeprefix("bytes=").split("-")
        part = data[int(start) : int(stop) + 1]
        return (206, part) if part else (416, b"")


def test_a_run_behind_links_is_read_a_step_ahead(runs: Any) -> None:
    run = runs()
    server = _Linked(Path(run.place.url))
    linked = HarvestedRun.open(server.place())
    stream = ActivationStream(linked, layers=[1], batch_rows=16, shuffle_rows=64)
    iterator = iter(stream)
    next(iterator)
    ahead = len({name for name in server.asked if name.startswith("shard")})
    rest = list(iterator)

    # A block is 64 rows of some 900; the units that follow it are on their way before they are wanted.
    assert ahead >= 3
    assert sum(map(len, rest)) + 16 == stream.n_rows
    server.fails = True
    with pytest.raises(TransferFailed):
        list(ActivationStream(HarvestedRun(server.place(), run.manifest), layers=[1]))


def test_a_run_that_only_this_process_can_read_is_not_handed_on(runs: Any) -> None:
    stream = ActivationStream(HarvestedRun.open(_Linked(Path(runs().place.url)).place()), layers=[1], **SMALL)
    with pytest.raises(Unsupported, match="num_workers=0"):
        copy.deepcopy(stream)
    there = multiprocessing.get_context("fork")
    told = there.SimpleQueue()

    def iterate() -> None:
        try:
            list(stream)
        except Unsupported as error:
            told.put(str(error))

    process = there.Process(target=iterate)
    process.start()
    process.join(20)
    assert process.exitcode == 0
    assert "spawn" in told.get()
    assert len(list(stream)) > 1


def test_a_run_in_an_object_store_goes_to_processes_of_their_own(runs: Any, s3_url: str) -> None:
    """Not to forked ones: the store's client does not live through a fork."""
    run, url = runs(), f"{s3_url}/run"
    place = open_place(url)
    for name in FolderPlace(run.place.url).names():
        place.put(name, run.place.get(name))
    stream = ActivationStream(url, layers=[1], normalise=False, drop_special=True, **SMALL)
    here = rows_of(stream)

    assert here == rows_of(ActivationStream(run, layers=[1], drop_special=True, **SMALL))
    loader = DataLoader(stream, batch_size=None, num_workers=1, multiprocessing_context="spawn")
    assert rows_of(loader) == here
    with pytest.raises(Unsupported, match="spawn"):
        next(iter(DataLoader(stream, batch_size=None, num_workers=1, multiprocessing_context="fork")))
