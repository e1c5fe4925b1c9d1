"""Harvests by the SDK and the command line against a started server: split, waited for, read over links, downloaded."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamtap.client.aio import AsyncClient
from streamtap.client.sync import Client
from streamtap.errors import HarvestFailed, HarvestNotCancellable, HarvestNotFound, InvalidInput, ScopeDenied
from streamtap.harvested.joined import JoinedRuns
from streamtap.harvested.reader import HarvestedRun
from streamtap.server.db import Database
from streamtap.server.ledger.keys import Keys
from streamtap.server.toml.config_file import read_config
from streamtap.testing.models import tiny_model
from streamtap.testing.tokenizers import tiny_tokenizer

pytestmark = pytest.mark.xdist_group("harvest sdk")

MODEL, LAYERS = "tiny", [0, 2]
PROMPTS = [f"prompt {number} " + "of some length " * (number % 5) for number in range(50)]
#: How long a link holds: long enough to be followed, short enough to be waited out.
LINK_SECONDS = 4.0


@pytest.fixture(scope="module")
def service(start_lasting_service: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_model("llama", max_position_embeddings=128).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    model = {"id": MODEL, "checkpoint": str(folder), "name": "org/tiny", "dtype": "float32", "device": "cpu"}
    limits = {"max_harvest_prompts": 20, "small_harvests_per_key": 2}
    return start_lasting_service(
        {**model, "max_activation_prompt_tokens": 100_000},
        engines="shared",
        limits=limits,
        harvest={"link_days": LINK_SECONDS / 86400},
    )


@pytest.fixture
def client(service: Any) -> Any:
    with Client(service.base_url, service.new_key(f"sdk {time.monotonic_ns()}")) as one:
        yield one


def same_as_inline(client: Client, run: Any, i: int) -> None:
    completion = client.complete(
        PROMPTS[i], model=MODEL, max_tokens=1, output_residual_stream=LAYERS, output_dtype="float32", binary=True
    )
    rows = completion.activations
    assert rows is not None
    assert run.token_ids(i).tolist() == rows.token_ids.tolist()
    for layer in LAYERS:
        # Rows in files are bfloat16, of values that differ by the order of sums.
        np.testing.assert_allclose(run.prompt(i)[layer].astype(np.float32), rows.acts[layer], rtol=0.01, atol=0.02)


def test_more_prompts_than_a_job_may_have_and_more_jobs_than_slots(client: Client, tmp_path: Path) -> None:
    told: list[int] = []

    job = client.harvest(PROMPTS, model=MODEL, layers=LAYERS, shard_size=8)
    before = job.known.unsent_prompts
    run = job.wait(120, on_progress=lambda known: told.append(known.prompts_done)).open()

    assert before > 0
    assert told == sorted(told)
    assert told[-1] == len(run) == 50
    assert isinstance(run, JoinedRuns)
    for i in (0, 19, 24, 25, 49):
        same_as_inline(client, run, i)
    job.download(tmp_path)
    here = HarvestedRun.open(tmp_path)
    here.verify()
    for i in range(50):
        np.testing.assert_array_equal(here.prompt(i)[2], run.prompt(i)[2])


def test_links_that_ended_are_signed_anew_behind_the_reader(client: Client) -> None:
    run = client.harvest(PROMPTS[:12], model=MODEL, layers="1-2", shard_size=2).wait(120).open()
    assert isinstance(run, HarvestedRun)
    first = run.prompt(0)[1]
    time.sleep(LINK_SECONDS + 1.5)

    assert run.layers == (1, 2)
    assert run.prompt(11)[1].shape[1] == first.shape[1] == 32
    run.verify()


def test_an_async_client_does_the_same(service: Any, tmp_path: Path) -> None:
    async def main() -> Any:
        async with AsyncClient(service.base_url, service.new_key("awaited")) as client:
            job = await client.harvest(PROMPTS[:9], model=MODEL, layers=-1, pooling="mean")
            await job.wait(120)
            assert [each.job_id for each in await client.harvests()] == list(job.ids)
            return await job.open(), await job.download(tmp_path)

    there, folder = asyncio.run(main())
    here = HarvestedRun.open(folder)
    assert here.layers == there.layers == (2,)
    np.testing.assert_array_equal(here.activations().acts[2], there.activations().acts[2])
    assert here.activations().acts[2].shape == (9, 32)


def test_a_job_is_cancelled_and_its_slot_is_free(client: Client) -> None:
    slow = [f"{number} " + "long " * 20 for number in range(20)]
    jobs = [client.harvest(slow, model=MODEL, shard_size=1, batch_size=1) for _ in range(2)]

    known = jobs[0].cancel()
    third = client.harvest(["a"], model=MODEL)

    assert known.state == "cancelled"
    with pytest.raises(HarvestNotCancellable):
        jobs[0].cancel()
    with pytest.raises(HarvestFailed, match="was cancelled"):
        jobs[0].wait()
    with pytest.raises(HarvestNotFound, match="has no files"):
        jobs[0].open()
    assert third.wait(120).known.state == "done"
    jobs[1].wait(120)


def test_a_job_is_its_keys_alone(service: Any, client: Client) -> None:
    job = client.harvest(["a", "b"], model=MODEL)

    with Client(service.base_url, service.new_key("another")) as other:
        with pytest.raises(HarvestNotFound):
            other.harvest_job(*job.ids)
        assert other.harvests() == []
    assert client.harvest_job(*job.ids).wait(120).known.n_prompts == 2


def test_a_key_without_the_scope_is_refused(service: Any) -> None:
    database = Database.open(read_config(service.file).database_url)
    try:
        key = Keys(database).create("completes only", scopes=("completions",)).secret
    finally:
        database.close()

    with Client(service.base_url, key) as client, pytest.raises(ScopeDenied):
        client.harvest(["a"], model=MODEL)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": [9]}, "names layer 9"),
        ({"project_onto": np.ones((1, 5))}, "5 wide"),
        ({"positions": [100]}, "prompt 0"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_at_once(client: Client, options: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        client.harvest(["a short one"], model=MODEL, **options)
    assert client.harvests() == []


def test_the_command_line(service: Any, tmp_path: Path) -> None:
    key = service.new_key("command line")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in PROMPTS))

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        variables = {**os.environ, "STREAMTAP_API_BASE": service.base_url, "STREAMTAP_API_KEY": key}
        command = [sys.executable, "-m", "streamtap", "harvest", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=240)

    submitted = run("submit", "prompts.jsonl", "--model", MODEL, "--layers", "all", "--positions", "last")
    ids = submitted.stdout.split()
    assert submitted.returncode == 0, submitted.stderr
    fetched = run("download", *ids, "--out", "runs")
    listed = run("list", "--json")

    assert fetched.returncode == 0, fetched.stderr
    rows = HarvestedRun.open(tmp_path / "runs").activations(layers=[2])
    assert rows.acts[2].shape == (50, 32)
    assert [job["job_id"] for job in json.loads(listed.stdout)] == ids[::-1]
    assert {job["status"] for job in json.loads(listed.stdout)} == {"done"}
    assert "prompt " not in (service.folder / "service.log").read_text()
