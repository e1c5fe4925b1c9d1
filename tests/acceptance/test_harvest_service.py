"""Bulk jobs against a started server: 500 mixed prompts from submission to files, held against plain captures."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx2
import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from streamtap.codec import decode
from streamtap.tensor_file import read_tensors
from streamtap.testing.models import tiny_model
from streamtap.testing.tokenizers import tiny_tokenizer
from streamtap.wire.harvest_jobs import JobView, read_job

pytestmark = pytest.mark.xdist_group("harvest service")

MODEL, LAYERS, CONTEXT, HIDDEN = "tiny", [0, 2], 128, 32
ALPHABET = "abcdefghij klmno pqrstu vwxyz.,:;!?ABCDEF äß→\n"
#: One prompt a file and a pass, so that a job lasts and can be stopped in its middle.
SLOW = {"prompts": [f"{number} " + "long " * 20 for number in range(2000)], "shard_size": 1, "batch_size": 1}


def mixed(count: int) -> list[str]:
    """Texts of one character to more than the context, some with characters that the tokenizer does not know."""
    draw = random.Random(5)
    lengths = [draw.choice([1, 2, 7, 30, 90, CONTEXT - 1, CONTEXT, 3 * CONTEXT]) for _ in range(count)]
    return ["".join(draw.choice(ALPHABET) for _ in range(length)) for length in lengths]


PROMPTS = mixed(500)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    tiny_model("llama", max_position_embeddings=CONTEXT).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def table(checkpoint: Path) -> dict[str, Any]:
    about = {"id": MODEL, "checkpoint": str(checkpoint), "name": "org/tiny", "dtype": "float32", "device": "cpu"}
    return {**about, "max_activation_prompt_tokens": 1_000_000}


@pytest.fixture(scope="module")
def service(start_lasting_service: Any, table: dict[str, Any]) -> Any:
    return start_lasting_service(table, engines="shared", limits={"small_harvests_per_key": 50})


@dataclass
class Run:
    """A job that is done, and its files as anybody fetches them who has the links."""

    view: JobView

    @cached_property
    def files(self) -> dict[str, bytes]:
        assert self.view.result is not None
        urls = [self.view.result.manifest_url, self.view.result.stats_url, *self.view.result.shard_urls]
        with httpx2.Client(trust_env=False, verify=False, timeout=60) as client:
            answers = {httpx2.URL(url).path.rpartition("/")[2]: client.get(url) for url in urls}
        assert {answer.status_code for answer in answers.values()} == {200}
        return {name: answer.content for name, answer in answers.items()}

    @cached_property
    def manifest(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.files["manifest.json"])
        return found

    @cached_property
    def tensors(self) -> dict[str, NDArray[Any]]:
        """Those of all shards."""
        found: dict[str, NDArray[Any]] = {}
        for shard in self.manifest["shards"]:
            found |= read_tensors(self.files[shard["key"]], shard["key"])[0]
        return found

    @cached_property
    def statistics(self) -> dict[str, NDArray[Any]]:
        return read_tensors(self.files["stats.safetensors"], "stats.safetensors")[0]


def submit(service: Any, **body: Any) -> httpx2.Response:
    with service.client() as client:
        found: httpx2.Response = client.post("/harvest", json={"model": MODEL, "layers": LAYERS, **body})
        return found


def submitted(service: Any, **body: Any) -> str:
    answer = submit(service, **body)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["job_id"])


def look(service: Any, job_id: str, wait: float = 0) -> JobView:
    with service.client() as client:
        answer = client.get(f"/harvest/{job_id}", params={"wait": wait})
    assert answer.status_code == 200, answer.text
    return read_job(answer.json())


def ended(service: Any, job_id: str, seconds: float = 120) -> JobView:
    end = time.monotonic() + seconds
    while not (view := look(service, job_id, wait=30)).is_over:
        assert time.monotonic() < end, view
    return view


def done(service: Any, **body: Any) -> Run:
    view = ended(service, submitted(service, **body))
    assert view.status == "done", view
    return Run(view)


def runs_of(service: Any) -> Path:
    found: Path = service.folder / "streamtap-data" / "harvest"
    return found


@pytest.fixture(scope="module")
def five_hundred(service: Any, wait_until: Any) -> Run:
    """The job of 500 prompts, which nobody asks for until its manifest is there."""
    before = set(runs_of(service).glob("*/manifest.json"))
    answer = submit(service, prompts=PROMPTS)
    assert answer.status_code == 202, answer.text
    assert answer.json() == {**answer.json(), "status": "pending", "model": MODEL, "n_prompts": 500}
    assert wait_until(lambda: set(runs_of(service).glob("*/manifest.json")) != before, 120)
    # The manifest is the last file; its job hears of it a moment later.
    view = look(service, answer.json()["job_id"], wait=10)
    assert view.status == "done", view
    return Run(view)


@pytest.fixture(scope="module")
def tokenised() -> list[list[int]]:
    tokenizer = tiny_tokenizer()
    return [tokenizer(text)["input_ids"][:CONTEXT] for text in PROMPTS]


def inline(service: Any, prompts: Sequence[Sequence[int]]) -> list[NDArray[Any]]:
    """Rows of each prompt [layers, tokens, hidden] in float32, captured by completions."""
    found: list[NDArray[Any]] = []
    for start in range(0, len(prompts), 50):
        body = {"model": MODEL, "prompt": [list(ids) for ids in prompts[start : start + 50]], "max_tokens": 0}
        # A request for all layers may have as many positions as the table above says.
        told = service.complete(**body, output_residual_stream=True, output_dtype="float32")
        found += [decode(**each["activations"]["residual_stream"])[LAYERS] for each in told["choices"]]
    return found


def test_progress_comes_to_its_end_without_a_poll(five_hundred: Run) -> None:
    view = five_hundred.view

    assert (view.prompts_done, view.shards_done) == (500, 16)
    assert view.result is not None
    assert (view.result.n_shards, view.result.layer_indices) == (16, tuple(LAYERS))
    assert view.accounting is not None
    assert 0 < view.accounting.in_container_s <= view.accounting.wall_clock_s
    assert view.created_at is not None
    assert view.completed_at is not None
    assert view.urls_expire_at is not None
    assert view.created_at < view.completed_at < view.urls_expire_at
    assert (view.urls_expire_at - view.completed_at).days in (6, 7)


def test_every_file_is_what_the_manifest_says(five_hundred: Run) -> None:
    manifest = five_hundred.manifest

    assert set(manifest) >= {
        *("run_id", "layout_version", "model_id", "hf_repo", "revision", "dtype", "compression", "capture"),
        *("add_special_tokens", "layer_indices", "residual_stream_convention", "n_prompts", "contents", "projection"),
        *("tensor_layout", "tokens_layout", "statistics", "mean_token_norm", "truncated_prompts", "shards"),
    }
    assert (manifest["run_id"], manifest["layout_version"]) == (five_hundred.view.run_id, 2)
    assert (manifest["model_id"], manifest["hf_repo"]) == (MODEL, "org/tiny")
    assert (manifest["dtype"], manifest["contents"]) == ("bfloat16", "activations")
    assert [index for shard in manifest["shards"] for index in shard["prompt_indices"]] == list(range(500))
    for shard in manifest["shards"]:
        data = five_hundred.files[shard["key"]]
        assert (len(data), hashlib.sha256(data).hexdigest()) == (shard["bytes"], shard["sha256"])
        held = read_tensors(data, shard["key"])[0]
        assert {name: list(values.shape) for name, values in held.items()} == {
            tensor["name"]: tensor["shape"] for tensor in shard["tensors"]
        }
    assert len(five_hundred.tensors) == 1000


def test_tokens_are_those_of_our_tokenizer_and_long_prompts_are_told(
    five_hundred: Run, tokenised: list[list[int]]
) -> None:
    for index, ids in enumerate(tokenised):
        tokens = five_hundred.tensors[f"tokens_{index}"]
        assert (tokens.dtype, tokens.tolist()) == (np.int32, ids)
    # BOS is a token of theirs too.
    whole = [len(text) + 1 for text in PROMPTS]
    cut = [{"index": i, "tokens": n, "kept": CONTEXT} for i, n in enumerate(whole) if n > CONTEXT]
    assert cut
    assert five_hundred.manifest["truncated_prompts"] == cut


def test_rows_are_those_of_a_plain_capture(service: Any, five_hundred: Run, tokenised: list[list[int]]) -> None:
    for index, expected in enumerate(inline(service, tokenised)):
        rows = five_hundred.tensors[f"prompt_{index}"]
        assert (rows.dtype, rows.shape) == (ml_dtypes.bfloat16, (2, len(tokenised[index]), HIDDEN))
        # Half a unit of bfloat16, and what batches of other sizes differ by.
        off = np.abs(rows.astype(np.float32) - expected)
        assert (off <= 2**-8 * np.abs(expected) + 1e-3 * np.abs(expected).max()).all(), index


def test_statistics_are_those_of_the_rows_without_bos(five_hundred: Run) -> None:
    kept = []
    for index in range(500):
        rows, tokens = five_hundred.tensors[f"prompt_{index}"], five_hundred.tensors[f"tokens_{index}"]
        kept.append(rows[:, tokens != 0].astype(np.float64))
    every = np.concatenate(kept, axis=1)

    told = five_hundred.statistics
    assert told["layer_indices"].tolist() == LAYERS
    assert (told["mean"].dtype, told["mean"].shape) == (np.float32, (2, HIDDEN))
    np.testing.assert_allclose(told["mean"], every.mean(axis=1), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(told["std"], every.std(axis=1), rtol=1e-5)
    np.testing.assert_allclose(
        five_hundred.manifest["mean_token_norm"], np.linalg.norm(every, axis=2).mean(axis=1), rtol=1e-6
    )
    assert five_hundred.manifest["statistics"]["count"] == every.shape[1]


def test_the_manifest_is_the_last_file_and_nothing_else_is_left(service: Any, five_hundred: Run) -> None:
    folder = runs_of(service) / str(five_hundred.view.run_id)
    written = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}

    assert {"manifest.json", "stats.safetensors", "run.json"} <= set(written)
    assert max(at for name, at in written.items() if name != "manifest.json") <= written["manifest.json"]
    assert not [name for name in written if name.startswith("whole_")]
    assert not list((service.folder / "streamtap-data" / "harvest-inputs").glob("*.json"))


def test_token_ids_give_the_same_run(service: Any, five_hundred: Run, tokenised: list[list[int]]) -> None:
    # Whole shards of the other run: a batch never crosses one, so that bits are the same.
    run = done(service, prompts=tokenised[:96])

    for index in range(96):
        for kind in ("tokens", "prompt"):
            name = f"{kind}_{index}"
            assert run.tensors[name].tobytes() == five_hundred.tensors[name].tobytes()


@pytest.mark.parametrize("pooling", ["none", "mean"])
def test_projections_are_products_with_unit_directions(service: Any, tokenised: list[list[int]], pooling: str) -> None:
    directions = np.random.default_rng(0).normal(size=(5, HIDDEN)).astype(np.float32) * 7
    data = base64.b64encode(directions.tobytes()).decode()
    onto = {"data": data, "dtype": "float32", "shape": [5, HIDDEN], "compression": "none"}

    run = done(service, prompts=PROMPTS[:40], project_onto=onto, pooling=pooling)

    assert (run.manifest["contents"], run.manifest["dtype"]) == ("projections", "float32")
    unit = directions / np.linalg.norm(directions, axis=1, keepdims=True)
    for index, rows in enumerate(inline(service, tokenised[:40])):
        kept = rows if pooling == "none" else rows.mean(axis=1, keepdims=True)
        found = run.tensors[f"prompt_{index}"]
        assert (found.dtype, found.shape) == (np.float32, (2, kept.shape[1], 5))
        np.testing.assert_allclose(found, kept @ unit.T, rtol=1e-4, atol=1e-4 * np.abs(rows).max())


def test_one_row_a_prompt(service: Any, tokenised: list[list[int]]) -> None:
    last = done(service, prompts=PROMPTS[:40], positions="last")
    mean = done(service, prompts=PROMPTS[:40], pooling="mean", layers="all")

    assert mean.manifest["layer_indices"] == [0, 1, 2]
    for index, rows in enumerate(inline(service, tokenised[:40])):
        found = last.tensors[f"prompt_{index}"].astype(np.float32)
        assert last.tensors[f"positions_{index}"].tolist() == [len(tokenised[index]) - 1]
        np.testing.assert_allclose(found, rows[:, -1:], rtol=2**-7, atol=1e-3 * np.abs(rows).max())
        pooled = mean.tensors[f"prompt_{index}"][[0, 2]].astype(np.float32)
        np.testing.assert_allclose(pooled[:, 0], rows.mean(axis=1), rtol=2**-7, atol=2e-3 * np.abs(rows).max())


def test_a_text_that_has_its_bos_gets_two_and_only_where_they_are_wanted(service: Any) -> None:
    """The tokenizer adds one: of a rendered chat, say, that is one too many."""
    bos = tiny_tokenizer().bos_token_id

    two = done(service, prompts=["<s>Hello"]).tensors["tokens_0"].tolist()
    one = done(service, prompts=["<s>Hello"], add_special_tokens=False)

    assert two[:2] == [bos, bos]
    assert one.tensors["tokens_0"].tolist() == two[1:]
    assert one.manifest["add_special_tokens"] is False


def test_a_small_job_takes_seconds_once_the_engine_is_warm(service: Any) -> None:
    done(service, prompts=["warm"])
    begun = time.monotonic()

    run = done(service, prompts=["a small job", "of two prompts"])

    assert run.view.result is not None
    assert time.monotonic() - begun - run.view.result.timings["harvest_s"] < 5


def workers_under(service: Any) -> list[int]:
    """Process ids of the workers of a gateway, and of the keepers that hold them."""
    return [pid for pid, args in service.processes() if "harvests.worker" in args]


def test_refused_jobs_reach_no_worker(start_service: Any, table: dict[str, Any], fake: Any) -> None:
    service = start_service(table, {**fake("upstream"), "activations": False}, engines="shared")
    zero = {"data": "AAAAAA==", "dtype": "float32", "shape": [1, 1], "compression": "none"}
    wrong: list[tuple[Mapping[str, Any], int, str]] = [
        ({"prompts": []}, 400, "invalid_request"),
        ({"prompts": ["a", [1]]}, 400, "invalid_request"),
        ({"prompts": [[97]]}, 400, "invalid_request"),
        ({"prompts": ["a"], "layers": [3]}, 400, "invalid_request"),
        ({"prompts": ["a"], "positions": [5]}, 400, "invalid_request"),
        ({"prompts": ["a"], "project_onto": zero}, 400, "invalid_request"),
        ({"prompts": ["a"], "model": "nope"}, 400, "model_not_found"),
        ({"prompts": ["a"], "model": "upstream"}, 400, "harvest_unsupported"),
        ({"prompts": ["a"] * 4097}, 413, "request_too_large"),
        ({"prompts": [[5] * CONTEXT] * 4096, "extra": 1}, 400, "invalid_request"),
    ]
    for body, status, code in wrong:
        answer = submit(service, **body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text
    with service.client() as client:
        assert client.post("/harvest", content=b"{" + b" " * (50 << 20)).status_code == 413
        assert client.get("/harvest").json()["data"] == []

    time.sleep(1)
    assert workers_under(service) == []
    assert not list((service.folder / "streamtap-data" / "harvest-inputs").glob("*.json"))
    assert all(line["used"] == 0 for line in service.usage()["usage"].values())


def test_a_cancelled_job_stops_within_seconds_and_its_slot_is_free_at_once(
    start_service: Any, table: dict[str, Any], wait_until: Any
) -> None:
    service = start_service(table, engines="shared", limits={"small_harvests_per_key": 1})
    job_id = submitted(service, **SLOW)
    assert wait_until(lambda: look(service, job_id).shards_done >= 5, 60)
    assert submit(service, prompts=["a"]).json()["error"]["code"] == "harvest_concurrency_exceeded"

    with service.client() as client:
        ended_job = client.delete(f"/harvest/{job_id}")
        again = client.delete(f"/harvest/{job_id}")
        assert client.delete("/harvest/nothing").json()["error"]["code"] == "harvest_job_not_found"
    assert (ended_job.status_code, ended_job.json()["status"]) == (200, "cancelled")
    assert (again.status_code, again.json()["error"]["code"]) == (409, "harvest_not_cancellable")
    another = submitted(service, prompts=["a"])

    # The one worker is free for it only once the cancelled one has stopped.
    begun = time.monotonic()
    assert ended(service, another).status == "done"
    assert time.monotonic() - begun < 10
    assert look(service, job_id).status == "cancelled"
    assert look(service, job_id).result is None


def test_a_job_outlives_its_gateway(start_service: Any, table: dict[str, Any], wait_until: Any) -> None:
    service = start_service(table, engines="shared")
    job_id = submitted(service, **{**SLOW, "prompts": SLOW["prompts"][:200]})
    assert wait_until(lambda: look(service, job_id).shards_done >= 20, 60)

    assert service.stop() == 0
    (run,) = (each for each in runs_of(service).iterdir() if each.is_dir())
    whole = {file.name: file.stat().st_mtime_ns for file in run.glob("shard_*")}
    assert 20 <= len(whole) < 200
    service.start()

    view = ended(service, job_id)
    assert view.status == "done", view
    assert (view.prompts_done, view.shards_done) == (200, 200)
    # What was whole was not made again.
    assert {name: (run / name).stat().st_mtime_ns for name in whole} == whole
    assert len(Run(view).files) == 202
