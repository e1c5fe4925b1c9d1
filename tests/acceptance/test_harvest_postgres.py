"""Bulk jobs on PostgreSQL, and with several gateways on it, each with workers of its own over one folder of files."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from numpy.typing import NDArray

from streamtap import CaptureSpec, TransformersEngine
from streamtap.harvested.linked_place import LinkedPlace
from streamtap.harvested.reader import HarvestedRun
from streamtap.testing.models import tiny_model
from streamtap.testing.tokenizers import tiny_tokenizer

MODEL = "tiny"
LAYERS = [0, 2]
PROMPTS = [f"Prompt {number} of many" + "." * (number % 9) for number in range(40)]
#: One prompt a file and a pass, so that a job lasts and can be ended in its middle.
SLOW = {"prompts": [f"{number} " + "long " * 90 for number in range(150)], "shard_size": 1, "batch_size": 1}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def start(
    start_service: Callable[..., Any], postgres: Any, checkpoint: Path, tmp_path: Path
) -> Callable[..., list[Any]]:
    """Starts gateways on one new database, with one folder for the files of their jobs."""
    database = postgres.new_database()

    def started(count: int = 1, limits: Mapping[str, Any] | None = None, **harvest: Any) -> list[Any]:
        model = {"id": MODEL, "checkpoint": str(checkpoint), "dtype": "float32", "device": "cpu"}
        table = {"store": str(tmp_path / "harvests"), "lease_seconds": 5, **harvest}
        return [start_service(model, database=database, limits=limits, harvest=table) for _ in range(count)]

    return started


def submit(service: Any, key: str | None = None, **body: Any) -> httpx2.Response:
    asked = {"model": MODEL, "prompts": PROMPTS, "layers": LAYERS, "shard_size": 8, **body}
    with service.client(key) as client:
        found: httpx2.Response = client.post("/harvest", json=asked)
        return found


def job_id(answer: httpx2.Response) -> str:
    assert answer.status_code == 202, answer.text
    return str(answer.json()["job_id"])


def look(service: Any, job: str, *, wait: float = 0, key: str | None = None) -> dict[str, Any]:
    with service.client(key) as client:
        answer = client.get(f"/harvest/{job}", params={"wait": wait})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found


def ended(service: Any, job: str, *, key: str | None = None, seconds: float = 120) -> dict[str, Any]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = look(service, job, wait=20, key=key)
        if found["status"] not in ("pending", "running"):
            return found
    pytest.fail(f"the job did not end: {found}")


def links_of(job: Mapping[str, Any]) -> dict[str, str]:
    result = job["result"]
    urls = [result["manifest_url"], result["stats_url"], *result["shard_urls"]]
    return {httpx2.URL(url).path.rpartition("/")[2]: url for url in urls}


def get(url: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
    answer = httpx2.get(url, headers=dict(headers), trust_env=False, verify=False)
    return answer.status_code, answer.content


def opened(service: Any, job: Mapping[str, Any], key: str | None = None) -> HarvestedRun:
    """The job's files, by its links alone."""
    return HarvestedRun.open(
        LinkedPlace(links_of(job), get, lambda: links_of(look(service, str(job["job_id"]), key=key)))
    )


def captured(checkpoint: Path, prompts: Sequence[str]) -> list[dict[int, NDArray[Any]]]:
    """Each prompt by itself, in this process."""
    engine = TransformersEngine.load(str(checkpoint), dtype="float32", device="cpu")
    return [next(iter(engine.capture([prompt], CaptureSpec(layers=LAYERS)))).acts for prompt in prompts]


def workers_of(service: Any) -> list[int]:
    """Process ids of the workers that are the gateway's, without the keepers that hold them."""
    found = service.processes()
    return [pid for pid, args in found if "streamtap.server.harvests.worker" in args and "keeper" not in args]


def test_a_job_runs_to_its_end_with_nobody_asking(
    start: Callable[..., list[Any]], checkpoint: Path, wait_until: Callable[..., bool], tmp_path: Path
) -> None:
    [service] = start()
    answer = submit(service)
    job = job_id(answer)
    assert answer.json()["n_prompts"] == len(PROMPTS)
    assert wait_until(lambda: list((tmp_path / "harvests").rglob("manifest.json")), 120)

    found = look(service, job, wait=20)

    assert found["status"] == "done", found
    assert found["progress"] == {"prompts_done": len(PROMPTS), "shards_done": 5}
    run = opened(service, found)
    run.verify()
    assert run.manifest.run_id == found["run_id"]
    for index, acts in enumerate(captured(checkpoint, PROMPTS)):
        for layer, rows in run.prompt(index).items():
            worst = np.abs(rows.astype(np.float32) - acts[layer].astype(np.float32)).max()
            assert worst <= 0.01 * np.abs(acts[layer]).max()


def test_gateways_share_jobs_slots_and_cancels(start: Callable[..., list[Any]]) -> None:
    one, other = start(2, limits={"small_harvests_per_key": 2})
    key = one.key
    first = job_id(submit(one, key, **SLOW))
    job_id(submit(other, key, **SLOW))

    refused = submit(one, key)
    assert refused.status_code == 429, refused.text
    assert refused.json()["error"]["code"] == "harvest_concurrency_exceeded"
    assert refused.headers["Retry-After"] == "30"
    assert submit(other, key).status_code == 429

    with other.client(key) as client:
        assert client.delete(f"/harvest/{first}").status_code == 200
        assert client.delete(f"/harvest/{first}").status_code == 409
    assert look(one, first, key=key)["status"] == "cancelled"
    last = job_id(submit(other, key))
    assert ended(one, last, key=key)["status"] == "done"
    with other.client(other.key) as client:
        assert client.get(f"/harvest/{first}").status_code == 404


def test_jobs_of_two_gateways_are_each_run_once(start: Callable[..., list[Any]]) -> None:
    one, other = start(2, limits={"small_harvests_per_key": 20})
    jobs = [job_id(submit((one, other)[number % 2], one.key)) for number in range(8)]

    found = [ended(one, job, key=one.key) for job in jobs]

    assert [each["status"] for each in found] == ["done"] * len(jobs)
    assert len({each["run_id"] for each in found}) == len(jobs)
    hashes = {tuple(shard.sha256 for shard in opened(one, each, one.key).manifest.shards) for each in found}
    assert len(hashes) == 1


def test_a_killed_workers_job_goes_on_at_the_other_gateway(
    start: Callable[..., list[Any]], wait_until: Callable[..., bool], tmp_path: Path
) -> None:
    one, other = start(2)
    job = job_id(submit(one, one.key, **SLOW))
    assert wait_until(lambda: look(one, job, key=one.key)["progress"]["shards_done"] >= 5, 120)
    busy = [service for service in (one, other) if workers_of(service)]
    pids = [pid for service in busy for pid in workers_of(service)]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)

    found = ended(other, job, key=one.key)

    assert found["status"] == "done", found
    run = opened(other, found, one.key)
    run.verify()
    assert len(run) == len(SLOW["prompts"])
    assert [shard.prompt_indices for shard in run.manifest.shards] == [(i,) for i in range(len(run))]
