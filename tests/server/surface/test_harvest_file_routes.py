"""Files of a run by signed links: no key, ranges, what the caller has already, and an end to links."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest

from streamtap.server.harvests.signing import SECRET_NAME
from streamtap.server.surface.routes import harvest_files
from streamtap.testing.fake_clock import FakeClock

With = Callable[..., None]
SHARD = bytes(range(256)) * 16
FILES = {"manifest_json": b'{"run_id": 1}', "shard_00000_safetensors": SHARD, "stats_safetensors": b"stats"}
#: What the stub's own server is called in a link.
BASE = "http://127.0.0.1:2"


def named(files: dict[str, bytes]) -> dict[str, bytes]:
    return {".".join(name.rsplit("_", 1)): data for name, data in files.items()}


async def links(gateway: Any) -> dict[str, str]:
    """Paths with their queries, by the names of the files."""
    await gateway.new_job()
    job = gateway.done(**named(FILES))
    return await signed(gateway, job.id)


async def signed(gateway: Any, job_id: str) -> dict[str, str]:
    result = (await gateway.get(f"/v1/harvest/{job_id}")).json["result"]
    urls = [result["manifest_url"], result["stats_url"], *result["shard_urls"]]
    assert all(url.startswith(f"{BASE}/v1/harvest/files/") for url in urls)
    return {url.partition("?")[0].rpartition("/")[2]: url.removeprefix(BASE) for url in urls}


def test_each_file_comes_without_a_key(with_gateway: With) -> None:
    async def act(gateway: Any) -> None:
        for name, url in (await links(gateway)).items():
            answer = await gateway.get(url, key=None)
            assert (answer.status, answer.body) == (200, named(FILES)[name])
            assert answer.headers["content-length"] == str(len(answer.body))
            assert answer.headers["accept-ranges"] == "bytes"
            assert answer.headers["etag"].startswith('"')
            assert answer.headers["content-type"] == (
                "application/json" if name == "manifest.json" else "application/octet-stream"
            )
            head = await gateway.get(url, key=None, method="HEAD")
            assert (head.status, head.body) == (200, b"")
            assert head.headers["content-length"] == answer.headers["content-length"]

    with_gateway(act)


@pytest.mark.parametrize(
    ("asked", "start", "stop"),
    [("bytes=0-9", 0, 10), ("bytes=4000-", 4000, 4096), ("bytes=-7", 4089, 4096), ("bytes=4095-9999", 4095, 4096)],
)
def test_a_range(asked: str, start: int, stop: int, with_gateway: With) -> None:
    async def act(gateway: Any) -> None:
        url = (await links(gateway))["shard_00000.safetensors"]
        answer = await gateway.get(url, key=None, range=asked)

        assert (answer.status, answer.body) == (206, SHARD[start:stop])
        assert answer.headers["content-range"] == f"bytes {start}-{stop - 1}/4096"
        assert answer.headers["content-length"] == str(stop - start)

    with_gateway(act)


@pytest.mark.parametrize("asked", ["bytes=4096-", "bytes=9999-10000", "bytes=-0"])
def test_a_range_that_the_file_does_not_have(asked: str, with_gateway: With) -> None:
    async def act(gateway: Any) -> None:
        url = (await links(gateway))["shard_00000.safetensors"]
        answer = await gateway.get(url, key=None, range=asked)

        assert (answer.status, answer.code) == (416, "invalid_request")
        assert answer.headers["content-range"] == "bytes */4096"
        assert int(answer.headers["content-length"]) == len(answer.body)

    with_gateway(act)


def test_ranges_in_several_parts_are_answered_with_the_whole(with_gateway: With) -> None:
    async def act(gateway: Any) -> None:
        url = (await links(gateway))["shard_00000.safetensors"]
        answer = await gateway.get(url, key=None, range="bytes=0-1,5-6")

        assert (answer.status, answer.body) == (200, SHARD)
        assert "content-range" not in answer.headers

    with_gateway(act)


def test_what_the_caller_has_already_is_not_sent(with_gateway: With) -> None:
    async def act(gateway: Any) -> None:
        url = (await links(gateway))["shard_00000.safetensors"]
        etag = (await gateway.get(url, key=None)).headers["etag"]

        for told in (etag, f'"x", W/{etag}', "*"):
            answer = await gateway.get(url, key=None, if_none_match=told)
            assert (answer.status, answer.body, answer.headers["etag"]) == (304, b"", etag)
        assert (await gateway.get(url, key=None, if_none_match='"x"')).status == 200
        assert (await gateway.get(url, key=None, range="bytes=0-1", if_range=etag)).status == 206
        assert (await gateway.get(url, key=None, range="bytes=0-1", if_range='"x"')).body == SHARD

    with_gateway(act)


def test_a_forged_link_is_refused_with_or_without_a_key(with_gateway: With) -> None:
    async def act(gateway: Any) -> None:
        found = await links(gateway)
        manifest, shard = found["manifest.json"], found["shard_00000.safetensors"]
        path, _, query = manifest.partition("?")
        forged = [
            path,
            f"{path}?expires=9999999999&signature={'0' * 64}",
            f"{path}?{query}0",
            f"{path}?{query.replace('expires=', 'expires=9')}",
            f"{shard.partition('?')[0]}?{query}",
            f"{path.replace('manifest.json', SECRET_NAME)}?{query}",
            f"{path.replace('manifest.json', '%2e%2e')}?{query}",
            f"{path.replace('manifest.json', 'ä')}?{query}",
        ]
        for url in forged:
            for key in (None, ""):
                answer = await gateway.get(url, key=key)
                assert (answer.status, answer.code) == (403, "access_denied"), url
                assert answer.json["error"]["type"] == "permission_error"

    with_gateway(act)


def test_a_link_ends_and_the_next_look_at_the_job_signs_another(with_gateway: With) -> None:
    clock = FakeClock()

    async def act(gateway: Any) -> None:
        found = await links(gateway)
        old = found["manifest.json"]
        job_id = (await gateway.get("/v1/harvest")).json["data"][0]["job_id"]
        clock.shift(timedelta(days=7).total_seconds() - 1)
        assert (await gateway.get(old, key=None)).status == 200
        clock.shift(1)

        ended = await gateway.get(old, key=None)
        assert (ended.status, ended.code) == (403, "access_denied")
        assert "expired; ask for the job again" in ended.json["error"]["message"]

        told = (await gateway.get(f"/v1/harvest/{job_id}")).json
        assert told["urls_expire_at"] == (clock.now() + timedelta(days=7)).isoformat()
        new = told["result"]["manifest_url"].removeprefix(BASE)
        assert new != old
        assert (await gateway.get(new, key=None)).body == FILES["manifest_json"]

        # Links do not outlive the files, and then there are none.
        clock.shift(timedelta(days=22).total_seconds())
        told = (await gateway.get(f"/v1/harvest/{job_id}")).json
        assert datetime.fromisoformat(told["urls_expire_at"]) == clock.now() + timedelta(days=1)
        clock.shift(timedelta(days=1).total_seconds())
        told = (await gateway.get(f"/v1/harvest/{job_id}")).json
        assert told["status"] == "done"
        assert "result" not in told

    with_gateway(act, clock=clock)


def test_files_that_were_removed(with_gateway: With) -> None:
    async def act(gateway: Any) -> None:
        url = (await links(gateway))["manifest.json"]
        (job,) = (await gateway.get("/v1/harvest")).json["data"]
        gateway.store.remove_run(job["run_id"])

        answer = await gateway.get(url, key=None)
        assert (answer.status, answer.code) == (404, "not_found")

        gateway.harvests.cleared(job["job_id"])
        assert "result" not in (await gateway.get(f"/v1/harvest/{job['job_id']}")).json

    with_gateway(act)


@pytest.mark.parametrize("kind", ["folder", "link", "pipe"])
def test_only_files_are_read(kind: str, with_gateway: With) -> None:
    async def act(gateway: Any) -> None:
        url = (await links(gateway))["manifest.json"]
        (job,) = (await gateway.get("/v1/harvest")).json["data"]
        file = gateway.store.folder / "harvest" / job["run_id"] / "manifest.json"
        file.unlink()
        if kind == "folder":
            file.mkdir()
        elif kind == "link":
            file.symlink_to(gateway.store.folder / "streamtap.db")
        else:
            os.mkfifo(file)

        async with asyncio.timeout(5):
            assert (await gateway.get(url, key=None)).status == 404

    with_gateway(act)


def test_a_large_file_comes_in_pieces(with_gateway: With) -> None:
    async def act(gateway: Any) -> None:
        await gateway.new_job()
        large = os.urandom(5 << 20)
        job = gateway.done(**{"shard_00000.safetensors": large})

        answer = await gateway.get((await signed(gateway, job.id))["shard_00000.safetensors"], key=None)
        assert answer.body == large
        assert max(map(len, answer.pieces)) <= 1 << 20

    with_gateway(act)


@pytest.mark.parametrize("how", ["its client leaves", "the file shrinks", "the server stops"])
def test_what_ends_a_file_under_way(how: str, with_gateway: With, monkeypatch: pytest.MonkeyPatch) -> None:
    # Thousands of pieces, so that there is time for it in any case.
    monkeypatch.setattr(harvest_files, "_PIECE_BYTES", 512)

    async def act(gateway: Any) -> None:
        await gateway.new_job()
        job = gateway.done(**{"shard_00000.safetensors": bytes(5 << 20)})
        call = gateway.call((await signed(gateway, job.id))["shard_00000.safetensors"], key=None)
        await call.until(lambda answered: len(answered.pieces) >= 1)
        if how == "its client leaves":
            call.leave()
        elif how == "the file shrinks":
            os.truncate(gateway.store.folder / "harvest" / job.run_id / "shard_00000.safetensors", 100)
        else:
            gateway.app.state.service.stopping.hurry()

        answer = await call.answer()
        assert not answer.whole
        assert len(answer.body) < 5 << 20

    with_gateway(act)


def test_an_empty_file(with_gateway: With) -> None:
    async def act(gateway: Any) -> None:
        await gateway.new_job()
        job = gateway.done(**{"manifest.json": b""})
        answer = await gateway.get((await signed(gateway, job.id))["manifest.json"], key=None)
        assert (answer.status, answer.body, answer.whole) == (200, b"", True)

    with_gateway(act)


def test_other_methods(with_gateway: With) -> None:
    async def act(gateway: Any) -> None:
        url = (await links(gateway))["manifest.json"]
        for method in ("POST", "PUT", "DELETE"):
            assert (await gateway.get(url, key=None, method=method)).code == "method_not_allowed"

    with_gateway(act)
