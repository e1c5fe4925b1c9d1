"""Pushes and reads that go wrong on the way to the local Hub and back: nothing is half there, sent twice or wrong."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from huggingface_hub import HfApi, file_download
from huggingface_hub.utils import _http

from streamtap import UnifiedCache, fetch_dataset_metadata, load_activations, push_dataset
from streamtap.dataset import hub_waiting, names, writer
from streamtap.errors import DatasetDamaged, DatasetExists, InvalidInput, TransferFailed
from streamtap.testing import FakeEngine, HubServer, online_client
from streamtap.testing.hub_server import Fault

REPO, LAYERS, HIDDEN = "tester/acts", 3, 512
SHARD_BYTES = 20 * HIDDEN * 4
PROMPTS = [f"prompt number {number}" for number in range(40)]
OLD, NEW = PROMPTS[:30], PROMPTS[5:]
#: Two shards a layer, and the index.
N_UPLOADS = LAYERS * 2 + 1
COMMIT = "^POST .*/commit/main$"
_PUSH = """
import json, sys
from streamtap import push_dataset
push_dataset(**json.load(sys.stdin))
"""
_WAIT_SECONDS = 30
_numbers = itertools.count()


@dataclass
class Place:
    """The Hub, the cache behind the dataset, and the machine that publishes; ``uploads`` finds each upload of NEW."""

    hub: HubServer
    cache: Path
    folder: Path
    uploads: list[str]

    def push(self, prompts: Sequence[str], **more: Any) -> str:
        return push_dataset(**{**options_of(self.cache, prompts), **more})

    def check(self, prompts: Sequence[str]) -> None:
        """A machine that knows nothing finds exactly this push, rows, labels and files."""
        with pytest.MonkeyPatch.context() as patch:
            new_machine(patch, self.folder / f"machine-{next(_numbers)}")
            acts, labels = load_activations(REPO, prompts=prompts, return_labels=True)
            assert fetch_dataset_metadata(REPO).num_prompts == len(prompts)
        with UnifiedCache(FakeEngine(LAYERS, HIDDEN), compute_perplexity=False, cache_dir=self.cache) as cache:
            assert all(np.array_equal(acts[layer], cache.activations(prompts, layer)) for layer in range(LAYERS))
        assert labels.tolist() == labels_of(prompts)

    def check_all_of(self, prompts: Sequence[str]) -> None:
        """The push came whole, in one commit, nothing twice; its files are those of its manifest, and none is left."""
        self.check(prompts)
        manifest = fetch_dataset_metadata(REPO, refresh=True).manifest
        there = self.hub.files(REPO).keys() - {".gitattributes", names.CARD, names.INDEX}
        hashes = {path: sha256(self.hub.read(REPO, path)).hexdigest() for path in there}
        assert hashes == {path: each.sha256 for path, each in manifest.files.items()}
        assert max(self.hub.objects().values()) == 1
        assert self.publications == 2
        assert self.left_here == []

    @property
    def publications(self) -> int:
        return [commit.title for commit in self.hub.commits(REPO)].count("Publish activations of fake")

    @property
    def left_here(self) -> list[Path]:
        return list((self.folder / "publisher" / "cache" / "datasets" / "outgoing").glob("*"))


def options_of(cache: Path, prompts: Sequence[str]) -> dict[str, Any]:
    """A push of these prompts in the place of what is there.

    In the order given: a shuffled one hangs on the name of the dataset, and with it the shards and their hashes.
    """
    given = {"repo_id": REPO, "model_name": "fake", "prompts": list(prompts), "labels": labels_of(prompts)}
    return {**given, "shard_max_bytes": SHARD_BYTES, "cache_dir": str(cache), "exist_ok": True, "shuffle": False}


def labels_of(prompts: Sequence[str]) -> list[int]:
    """They say which push it was."""
    return [len(prompts) * 100 + PROMPTS.index(prompt) for prompt in prompts]


def new_machine(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setenv("STREAMTAP_CACHE_DIR", str(folder / "cache"))
    patch.setenv("HF_HUB_CACHE", str(folder / "hf"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    with HubServer(tmp_path_factory.mktemp("hub")) as server:
        yield server


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    with UnifiedCache(FakeEngine(LAYERS, HIDDEN), compute_perplexity=False, cache_dir=folder) as cache:
        cache.warmup(PROMPTS)
    return folder


@pytest.fixture(scope="module")
def uploads(rows: Path) -> list[str]:
    """What finds each upload of NEW, in their order: the shards by their hashes, then the index."""
    folder = rows.with_name("local")
    push_dataset(**options_of(rows, NEW) | {"repo_id": folder})
    shards = [each.sha256 for each in fetch_dataset_metadata(folder).manifest.files.values()]
    assert len(shards) == N_UPLOADS - 1
    return [f"^PUT /cdn/.*/{each}$" for each in shards] + [rf"^PUT /cdn/.*/(?!{'|'.join(shards)})[0-9a-f]{{64}}$"]


@pytest.fixture
def place(
    server: HubServer, rows: Path, uploads: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    """The old dataset is there; nobody waits longer than a server asks."""
    new_machine(monkeypatch, tmp_path / "publisher")
    monkeypatch.setenv("HF_TOKEN", server.token)
    monkeypatch.setattr(hub_waiting, "_FIRST_WAIT_SECONDS", 0.01)
    server.clear_faults()
    with online_client(server):
        HfApi(endpoint=server.endpoint, token=server.token).delete_repo(REPO, repo_type="dataset", missing_ok=True)
        place = Place(server, rows, tmp_path, uploads)
        place.push(OLD)
        server.reset_counts()
        yield place


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the client waited by itself; it does not wait for real."""
    waited: list[float] = []
    clock = SimpleNamespace(sleep=waited.append, time=time.time)
    monkeypatch.setattr(_http, "time", clock)
    monkeypatch.setattr(file_download, "time", clock)
    return waited


@pytest.mark.parametrize("n_sent", range(N_UPLOADS + 1))
def test_a_push_that_stops_after_so_many_uploads(place: Place, n_sent: int) -> None:
    fault = place.hub.fail([*place.uploads, COMMIT][n_sent], status=400)
    with pytest.raises(TransferFailed, match="HTTP 400"):
        place.push(NEW, stream=True)

    assert fault.used == 1
    assert sum(place.hub.objects().values()) == n_sent
    assert place.left_here == []
    place.check(OLD)
    place.push(NEW, stream=True)
    place.check_all_of(NEW)


def test_a_push_that_stops_after_every_upload(place: Place) -> None:
    """Each try sends one more."""
    for n_sent, match in enumerate([*place.uploads, COMMIT]):
        place.hub.fail(match, status=400)
        with pytest.raises(TransferFailed):
            place.push(NEW)
        assert sum(place.hub.objects().values()) == n_sent
        place.check(OLD)
    place.push(NEW)
    place.check_all_of(NEW)


@pytest.mark.parametrize("n_sent", [3, N_UPLOADS - 1, N_UPLOADS], ids=["shards", "all shards", "all uploads"])
def test_a_push_that_is_killed(place: Place, n_sent: int) -> None:
    fault = place.hub.fail([*place.uploads, COMMIT][n_sent], status=503, retry_after=300, times=100)
    kill_push_at(fault, options_of(place.cache, NEW), place.hub)
    place.hub.clear_faults()

    assert place.left_here != []
    place.check(OLD)
    place.push(NEW)
    place.check_all_of(NEW)


def kill_push_at(fault: Fault, options: dict[str, Any], hub: HubServer) -> None:
    """Push in another process, which is gone once it met ``fault``."""
    command = [sys.executable, "-c", _PUSH]
    pipe, deadline = subprocess.PIPE, time.monotonic() + _WAIT_SECONDS
    with subprocess.Popen(command, stdin=pipe, stderr=pipe, text=True, env={**os.environ, **hub.environment}) as child:
        assert child.stdin
        child.stdin.write(json.dumps(options))
        child.stdin.close()
        while not fault.used and child.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        child.send_signal(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL, child.stderr.read() if child.stderr else ""
    assert fault.used


def test_a_busy_server_is_waited_for(place: Place) -> None:
    fault, started = place.hub.fail(COMMIT, status=429, retry_after=1, times=2), time.monotonic()
    place.push(NEW)

    assert fault.used == 2
    assert time.monotonic() - started >= 2
    place.check_all_of(NEW)


@pytest.mark.parametrize(
    ("match", "status"),
    [
        ("^GET /api/datasets/", 500),
        ("/preupload/", 500),
        ("/info/lfs/objects/batch$", 429),
        ("^PUT /cdn/", 500),
        ("^PUT /cdn/", 503),
        (COMMIT, 500),
    ],
)
def test_a_server_that_fails_now_and_then(place: Place, waits: list[float], match: str, status: int) -> None:
    fault = place.hub.fail(match, status=status, times=2)
    place.push(NEW)

    assert fault.used == 2
    place.check_all_of(NEW)


@pytest.mark.parametrize("times", [1, 3])
def test_an_upload_that_is_cut(place: Place, waits: list[float], times: int) -> None:
    cut = place.hub.cut("^PUT /cdn/", after_bytes=10_000, times=times)
    place.push(NEW)

    assert cut.used == times
    place.check_all_of(NEW)


def test_a_commit_whose_answer_is_lost(place: Place) -> None:
    lost = place.hub.lose_answer(COMMIT)
    place.push(NEW)

    assert lost.used == 1
    place.check_all_of(NEW)


def test_a_parent_that_is_stale(place: Place) -> None:
    fault = place.hub.stale_parent()
    place.push(NEW)

    assert fault.used == 1
    place.check_all_of(NEW)


SHARD = r"^GET /cdn/.*hidden_layer001_shard000\.safetensors"


def test_a_download_that_is_cut(place: Place, waits: list[float]) -> None:
    cut = place.hub.cut(SHARD, after_bytes=10_000)

    place.check(OLD)
    assert cut.used == 1


@pytest.mark.parametrize(
    ("match", "status"), [("^GET /api/datasets/", 500), ("/resolve/", 429), ("/resolve/", 500), (SHARD, 503)]
)
def test_a_read_from_a_server_that_fails(place: Place, waits: list[float], match: str, status: int) -> None:
    fault = place.hub.fail(match, status=status, times=2)

    place.check(OLD)
    assert fault.used == 2


def test_a_shard_that_comes_damaged_is_fetched_again(place: Place) -> None:
    fault = place.hub.corrupt(SHARD)

    place.check(OLD)
    assert fault.used == 1
    assert len([each for each in place.hub.requests if re.search(SHARD, f"{each.method} {each.path}")]) == 2


def test_a_shard_that_is_damaged_is_named(place: Place) -> None:
    fault = place.hub.corrupt(SHARD, times=100)

    with pytest.raises(DatasetDamaged, match=r"tensors/hidden_layer001_shard000\.safetensors of tester/acts is not"):
        place.check(OLD)
    assert fault.used == 2


@pytest.mark.parametrize("is_private", [False, True])
def test_another_visibility_stops_before_a_byte_is_sent(place: Place, is_private: bool) -> None:
    api = HfApi(endpoint=place.hub.endpoint, token=place.hub.token)
    api.update_repo_settings(REPO, repo_type="dataset", private=is_private)
    place.hub.reset_counts()

    with pytest.raises(InvalidInput, match=f"private={not is_private} was asked for; nothing was sent"):
        place.push(NEW, private=not is_private)
    assert place.hub.bytes_in() == 0
    assert {each.method for each in place.hub.requests} <= {"GET", "HEAD"}


def test_what_is_there_is_not_replaced_unasked(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "pack", None)

    with pytest.raises(DatasetExists, match=r"tester/acts holds \d+ files of something else"):
        place.push(NEW, exist_ok=False)
    assert place.hub.bytes_in() == 0
    assert {each.method for each in place.hub.requests} <= {"GET", "HEAD"}
    place.check(OLD)


@pytest.mark.parametrize("exist_ok", [False, True])
def test_the_same_push_again_does_nothing(place: Place, monkeypatch: pytest.MonkeyPatch, exist_ok: bool) -> None:
    monkeypatch.setattr(writer, "pack", None)
    before = [commit.id for commit in place.hub.commits(REPO)]

    assert place.push(OLD, exist_ok=exist_ok) == f"{place.hub.endpoint}/datasets/{REPO}"
    assert [commit.id for commit in place.hub.commits(REPO)] == before
    assert {each.method for each in place.hub.requests} <= {"GET", "HEAD"}
    assert set(place.hub.objects().values()) == {0}
