"""Files of harvests brought to a folder by both clients."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from streamtap.client.aio import AsyncClient
from streamtap.errors import HarvestDamaged, HarvestFailed, HarvestMismatch, TransferFailed
from streamtap.harvested.joined import JoinedRuns
from streamtap.harvested.reader import HarvestedRun
from streamtap.testing.stub_harvests import KEY, Asked, Reply, StubHarvests

PROMPTS = [f"prompt {i}" for i in range(10)]


def _files(stub: StubHarvests) -> list[str]:
    """Names of the files that were asked for, and forgets them."""
    found = [asked.path.rpartition("/")[2] for asked in stub.asked if asked.path.startswith("/files/")]
    stub.asked.clear()
    return found


def _same(one: Path, two: Path) -> bool:
    names = [sorted(path.name for path in folder.iterdir() if path.name != "run.json") for folder in (one, two)]
    return names[0] == names[1] and all((one / name).read_bytes() == (two / name).read_bytes() for name in names[0])


def test_a_run_comes_whole_and_only_once(user: Any, tmp_path: Path) -> None:
    job = user.done(PROMPTS, shard_size=4)
    told: list[tuple[int, int]] = []

    folder = user(job.download(tmp_path / "deep" / "run", on_bytes=lambda *counts: told.append(counts)))

    assert folder == tmp_path / "deep" / "run"
    assert _same(folder, user.stub.folder / "run-0")
    run = HarvestedRun.open(folder)
    run.verify()
    assert len(run) == 10
    assert told == sorted(told)
    assert told[-1] == (sum(entry.bytes for entry in run.manifest.shards),) * 2
    _files(user.stub)
    user(job.download(folder))
    assert sorted(set(_files(user.stub))) == ["manifest.json", "stats.safetensors"]


def test_several_jobs_come_as_one_run(user: Any, tmp_path: Path) -> None:
    user.stub.most_prompts, user.stub.slots = 4, 9
    job = user.done(PROMPTS, layers=[1, 2])
    told: list[tuple[int, int]] = []

    user(job.download(tmp_path, on_bytes=lambda *counts: told.append(counts)))
    here, there = HarvestedRun.open(tmp_path), user(job.open())

    here.verify()
    assert isinstance(there, JoinedRuns)
    assert len(job.ids) > 1
    for i in range(10):
        np.testing.assert_array_equal(here.prompt(i)[2], there.prompt(i)[2])
    assert told == sorted(told)
    assert told[-1][0] == told[-1][1]


def test_what_broke_off_goes_on_where_it_was(user: Any, tmp_path: Path) -> None:
    job = user.done(PROMPTS, shard_size=3)
    user.stub.before = lambda asked: Reply(404, {}, b"") if asked.path.endswith("shard_00002.safetensors") else None

    with pytest.raises(HarvestDamaged, match="shard_00002.safetensors of harvest job-0 is missing"):
        user(job.download(tmp_path))
    assert not (tmp_path / "manifest.json").exists()
    with pytest.raises(HarvestDamaged, match="no harvest"):
        HarvestedRun.open(tmp_path)

    user.stub.before = None
    here = {path.name for path in tmp_path.glob("shard_*")}
    _files(user.stub)
    user(job.download(tmp_path))
    assert here.isdisjoint(_files(user.stub))
    HarvestedRun.open(tmp_path).verify()


def test_links_that_end_in_the_middle_are_signed_anew(user: Any, tmp_path: Path) -> None:
    job = user.done(PROMPTS, shard_size=1)
    after: list[str] = []

    def before(asked: Asked) -> None:
        if asked.path.endswith("shard_00005.safetensors") and not after:
            after.append(asked.path)
            user.stub.end_links()

    user.stub.before = before
    user(job.download(tmp_path))

    HarvestedRun.open(tmp_path).verify()
    assert sum(asked.path == "/v1/harvest/job-0" for asked in user.stub.asked) <= 4


def test_another_run_in_the_folder_stays(user: Any, tmp_path: Path) -> None:
    first, second = user.done(["one"]), user.done(["two"])
    user(first.download(tmp_path))

    with pytest.raises(HarvestMismatch, match="holds run run-0, not run-1; name another folder"):
        user(second.download(tmp_path))
    assert HarvestedRun.open(tmp_path).manifest.run_id == "run-0"


def test_a_file_that_is_not_what_the_manifest_says_is_refused(user: Any, tmp_path: Path) -> None:
    job = user.done(PROMPTS)
    file = user.stub.folder / "run-0" / "shard_00000.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)

    with pytest.raises(HarvestDamaged, match="another content than its manifest says"):
        user(job.download(tmp_path))
    assert not [path for path in tmp_path.iterdir() if path.is_file()]


def test_a_store_that_fails_for_the_moment_is_asked_again(stub: StubHarvests, plain_user: Any, tmp_path: Path) -> None:
    job = plain_user.done(PROMPTS)
    left = [Reply(503, {}, b""), Reply(500, {}, b"")]
    stub.before = lambda asked: left.pop() if left and "/shard_" in asked.path else None

    job.download(tmp_path)

    assert plain_user.clock.slept[-2:] == [0.5, 1.0]
    stub.before = lambda asked: Reply(503, {}, b"") if asked.path.startswith("/files/") else None
    with pytest.raises(TransferFailed, match=r"files does not give a file of the harvest \(status 503\)") as caught:
        job.download(tmp_path / "other")
    assert "secret" not in str(caught.value)


def test_a_download_stops_when_told(plain_user: Any, tmp_path: Path) -> None:
    job = plain_user.done(PROMPTS, shard_size=1)
    counts: list[int] = []

    with pytest.raises(HarvestFailed, match="the download was stopped; the same call goes on"):
        job.download(tmp_path, on_bytes=lambda here, _all: counts.append(here), should_stop=lambda: len(counts) > 4)

    job.download(tmp_path)
    HarvestedRun.open(tmp_path).verify()


def test_a_cancelled_download_leaves_no_thread_behind(stub: StubHarvests, tmp_path: Path) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def before(asked: Asked) -> None:
        if "/shard_" in asked.path:
            begun.set()
            assert go_on.wait(10)

    def handle(request: httpx2.Request) -> httpx2.Response:
        reply = stub.answer(request.method, str(request.url), dict(request.headers), request.content)
        return httpx2.Response(reply.status, headers=reply.headers, content=reply.body)

    async def main() -> Any:
        async with AsyncClient("http://server/v1", KEY, transport=httpx2.MockTransport(handle)) as client:
            job = await (await client.harvest(PROMPTS, model="stub", shard_size=1)).wait()
            stub.before = before
            work = asyncio.ensure_future(job.download(tmp_path))
            assert await asyncio.to_thread(begun.wait, 10)
            work.cancel()
            await asyncio.sleep(0)
            go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await work
            assert [each for each in threading.enumerate() if each.name.startswith("streamtap-fetch")] == []
            stub.before = None
            return await job.download(tmp_path)

    HarvestedRun.open(asyncio.run(main())).verify()
