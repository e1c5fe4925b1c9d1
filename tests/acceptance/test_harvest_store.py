"""A harvest in a real object store: bit for bit as in a folder, through failures, and behind links that end (V58)."""

from __future__ import annotations

import hashlib
import http.client
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import numpy as np
import pytest

from streamtap import Client
from streamtap.blobs import BlobStore
from streamtap.errors import AccessDenied, HarvestFailed, TransferFailed
from streamtap.harvest.asked import HarvestAsk
from streamtap.harvest.plan import read_prompts
from streamtap.harvest.run import Progress, run_harvest
from streamtap.harvested.linked_place import LinkedPlace
from streamtap.harvested.manifest import HarvestManifest
from streamtap.harvested.opening import open_place
from streamtap.harvested.reader import HarvestedRun
from streamtap.testing import FakeEngine
from streamtap.testing.models import tiny_model
from streamtap.testing.tokenizers import tiny_tokenizer

PROMPTS = [f"prompt {number} is " + "so " * (number % 7) + "long" for number in range(20)]
ASK = HarvestAsk(layers=[0, 2], shard_size=4)
N_SHARDS = 5
RUN_ID = "a-run-of-the-tests"


def harvest(place: str | Path, spool: Path, engine: FakeEngine | None = None, **more: Any) -> HarvestManifest:
    engine = engine or FakeEngine()
    read = read_prompts(PROMPTS, engine.tokenizer)
    opened = open_place(place, retry_seconds=more.pop("retry_seconds", 20))
    return run_harvest(engine, read, opened, ASK, spool=spool, run_id=RUN_ID, **more)


def held(url: str) -> dict[str, bytes]:
    """Every object under an address."""
    store = BlobStore(url, retry_seconds=5)
    return {blob.path: store.get(blob.path) for blob in store.entries()[0]}


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def _handler(gate: Gate, store: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if gate._is_shut(self.command):
                self._answer(500, {}, b"<Error><Code>InternalError</Code></Error>")
                return
            link = http.client.HTTPConnection(store, timeout=30)
            link.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                link.putheader(name, value)
            link.endheaders(body)
            found = link.getresponse()
            self._answer(found.status, dict(found.getheaders()), found.read())
            link.close()

        def _answer(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
            self.send_response(status)
            for name, value in headers.items():
                if name.lower() not in ("transfer-encoding", "connection", "date", "server", "content-length"):
                    self.send_header(name, value)
            whole = headers.get("Content-Length") if self.command == "HEAD" else None
            self.send_header("Content-Length", whole or str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    for command in ("GET", "PUT", "POST", "DELETE", "HEAD"):
        setattr(Handler, f"do_{command}", Handler._pass_on)
    return Handler


class Gate:
    """Stands before the store and passes everything on, signatures too, or answers 500 while it is shut."""

    def __init__(self, endpoint: str) -> None:
        self.shut, self.refused = False, 0
        #: Shut once so many objects were written through it.
        self.shut_after = 10**9

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self, urlsplit(endpoint).netloc))
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _is_shut(self, command: str) -> bool:
        if command == "PUT":
            self.shut_after -= 1
            self.shut = self.shut or self.shut_after < 0
        self.refused += self.shut
        return self.shut


@pytest.fixture
def gate(s3_url: str, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(s3_endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", made.endpoint)
    yield made
    made.close()


def test_v26_a_run_is_the_same_in_a_store_as_in_a_folder(s3_url: str, tmp_path: Path) -> None:
    in_store = harvest(s3_url, tmp_path / "spool")
    in_folder = harvest(tmp_path / "run", tmp_path / "other-spool")

    assert in_store == in_folder
    objects = held(s3_url)
    assert objects == files_of(tmp_path / "run")
    shards = {f"shard_{number:05d}.safetensors" for number in range(N_SHARDS)}
    assert set(objects) == {*shards, "manifest.json", "stats.safetensors", "run.json"}
    for shard in in_store.shards:
        assert hashlib.sha256(objects[shard.key]).hexdigest() == shard.sha256
    assert list((tmp_path / "spool").rglob("*_0*")) == []


def test_a_run_is_read_from_the_store(s3_url: str, tmp_path: Path) -> None:
    engine = FakeEngine()
    harvest(s3_url, tmp_path / "spool", engine)

    run = HarvestedRun.open(s3_url)
    run.verify()

    for index in (0, 7, len(PROMPTS) - 1):
        token_ids = run.token_ids(index)
        rows = run.prompt(index)
        assert rows.keys() == {0, 2}
        for layer, values in rows.items():
            wanted = engine.rows(token_ids, layer).astype(values.dtype)
            assert np.array_equal(values.view(np.int16), wanted.view(np.int16))


def test_a_large_shard_is_sent_in_parts(s3_url: str, tmp_path: Path) -> None:
    engine = FakeEngine(n_layers=4, hidden=4096, context_tokens=512)
    read = read_prompts([[4 + (i * k) % 50 for i in range(400)] for k in range(1, 5)], engine.tokenizer)
    ask = HarvestAsk(layers="all", dtype="float32", shard_size=4)

    manifest = run_harvest(engine, read, open_place(s3_url), ask, spool=tmp_path / "spool")

    assert manifest.shards[0].bytes > 100 << 20
    digest = hashlib.sha256(BlobStore(s3_url).get(manifest.shards[0].key)).hexdigest()
    assert digest == manifest.shards[0].sha256


def test_a_store_that_fails_for_a_while_is_waited_for(gate: Gate, s3_url: str, tmp_path: Path) -> None:
    engine = FakeEngine()
    gate.shut_after = 4
    opening = threading.Timer(4, lambda: gate.__dict__.update(shut_after=10**9, shut=False))
    opening.start()

    manifest = harvest(s3_url, tmp_path / "spool", engine)

    assert gate.refused > 1
    assert manifest.n_prompts == len(PROMPTS)
    assert sorted(len(run.token_ids) for run in engine.runs) == sorted(
        len(tokens.token_ids) for tokens in read_prompts(PROMPTS, engine.tokenizer)
    )
    HarvestedRun.open(s3_url).verify()


def test_a_store_that_fails_for_longer_ends_the_run_and_the_same_call_goes_on(
    gate: Gate, s3_url: str, tmp_path: Path
) -> None:
    engine = FakeEngine()
    gate.shut_after = 4
    with pytest.raises(TransferFailed, match="try again later"):
        harvest(s3_url, tmp_path / "spool", engine, retry_seconds=1)
    assert "manifest.json" not in _names_behind(gate, s3_url)
    ran = len(engine.runs)
    assert list((tmp_path / "spool").rglob("shard_*.safetensors")), "what was not sent is kept"

    manifest = harvest(s3_url, tmp_path / "spool", engine)

    # What lies in the spool is sent from there; the shard that was cut short is all that ran again.
    assert ran < len(PROMPTS) + ASK.shard_size
    assert len(engine.runs) <= len(PROMPTS) + ASK.shard_size
    harvest(tmp_path / "run", tmp_path / "other-spool")
    assert held(s3_url) == files_of(tmp_path / "run")
    assert manifest.n_prompts == len(PROMPTS)


def _names_behind(gate: Gate, url: str) -> set[str]:
    gate.shut_after, gate.shut = 10**9, False
    return set(held(url))


def test_a_run_that_was_stopped_goes_on_in_the_store(s3_url: str, tmp_path: Path) -> None:
    first, second = FakeEngine(), FakeEngine()
    done: list[Progress] = []
    with pytest.raises(HarvestFailed):
        harvest(s3_url, tmp_path / "spool", first, on_progress=done.append, should_stop=lambda: len(done) >= 2)
    with pytest.raises(Exception, match="not whole yet"):
        HarvestedRun.open(s3_url)

    # On another machine: nothing is in its spool.
    harvest(s3_url, tmp_path / "another-spool", second)

    assert len(second.runs) <= len(PROMPTS) - 2 * ASK.shard_size
    harvest(tmp_path / "run", tmp_path / "other-spool")
    assert held(s3_url) == files_of(tmp_path / "run")


def _get(url: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
    answer = httpx2.get(url, headers=dict(headers), trust_env=False, verify=False)
    return answer.status_code, answer.content


@pytest.fixture
def signed(s3_url: str, tmp_path: Path) -> Callable[[float], dict[str, str]]:
    """Signs links to every file of a run for so many seconds."""
    manifest = harvest(s3_url, tmp_path / "spool")
    names = [*(shard.key for shard in manifest.shards), "manifest.json", "stats.safetensors"]
    store = BlobStore(s3_url)
    return lambda seconds: {name: store.sign(name, seconds) for name in names}


def _forged(link: str) -> str:
    return link[:-1] + "z"  # a signature is hexadecimal


def test_links_need_no_key_and_answer_ranges(signed: Callable[[float], dict[str, str]], s3_url: str) -> None:
    links = signed(60)
    whole = held(s3_url)["manifest.json"]

    for headers, status, wanted in [
        ({}, 200, whole),
        ({"Range": "bytes=10-19"}, 206, whole[10:20]),
        ({"Range": "bytes=-5"}, 206, whole[-5:]),
        ({"Range": f"bytes={len(whole)}-"}, 416, None),
    ]:
        found, body = _get(links["manifest.json"], headers)
        assert found == status
        assert wanted is None or body == wanted
    assert _get(_forged(links["manifest.json"]), {})[0] == 403
    assert _get(links["manifest.json"].replace("manifest.json", "run.json"), {})[0] == 403


def test_v58_a_link_that_ended_is_signed_anew_once_and_reading_goes_on(
    signed: Callable[[float], dict[str, str]], s3_url: str
) -> None:
    refreshed: list[int] = []

    def refresh() -> dict[str, str]:
        refreshed.append(1)
        return signed(60)

    place = LinkedPlace(links := signed(1), _get, refresh)
    name = "shard_00000.safetensors"
    whole = held(s3_url)[name]
    parts = [place.get_range(name, 0, 100), place.get_range(name, 100, 200)]
    time.sleep(2.5)
    assert _get(links[name], {})[0] == 403
    parts.append(place.get_range(name, 200, len(whole)))

    assert b"".join(parts) == whole
    assert len(refreshed) == 1
    run = HarvestedRun.open(place)
    run.verify()
    assert len(run) == len(PROMPTS)
    assert len(refreshed) == 1


def test_v58_a_link_that_is_refused_again_is_told_without_the_link(
    signed: Callable[[float], dict[str, str]],
) -> None:
    links = {name: _forged(link) for name, link in signed(60).items()}
    asked: list[int] = []

    def refresh() -> dict[str, str]:
        asked.append(1)
        return {name: link[:-2] + "zz" for name, link in links.items()}

    with pytest.raises(AccessDenied) as caught:
        LinkedPlace(links, _get, refresh).get("manifest.json")

    assert len(asked) == 1
    assert "http" not in str(caught.value)
    assert "Signature" not in str(caught.value)


@pytest.fixture
def service(s3_url: str, start_service: Callable[..., Any], tmp_path: Path) -> Any:
    """One that keeps its jobs' files in the store."""
    tiny_model("llama").save_pretrained(tmp_path / "checkpoint")
    tiny_tokenizer().save_pretrained(tmp_path / "checkpoint")
    model = {"id": "tiny", "checkpoint": str(tmp_path / "checkpoint"), "dtype": "float32", "device": "cpu"}
    return start_service(model, harvest={"store": s3_url})


def test_a_job_of_the_service_lies_in_the_store_behind_the_stores_own_links(service: Any, s3_url: str) -> None:
    with Client(service.base_url, service.key) as client:
        job = client.harvest(PROMPTS, model="tiny", layers=[0, 2], shard_size=8).wait(240)
        run, [view] = job.open(), job.status().jobs
    run.verify()
    assert len(run) == len(PROMPTS)

    objects = {blob.path for blob in BlobStore(s3_url).walk("harvest")}
    assert {path.rpartition("/")[2] for path in objects} == {
        *(f"shard_{number:05d}.safetensors" for number in range(3)),
        *("manifest.json", "stats.safetensors", "run.json"),
    }
    assert list(BlobStore(s3_url).walk("harvest-inputs")) == [], "prompts are gone with the job's end"
    assert view.result is not None
    link = view.result.shard_urls[1]
    assert not link.startswith(service.base_url)
    whole = _get(link, {})[1]
    assert hashlib.sha256(whole).hexdigest() == run.manifest.shards[1].sha256
    assert _get(link, {"Range": "bytes=8-15"}) == (206, whole[8:16])
    assert _get(re.sub("X-Amz-Expires=[0-9]+", "X-Amz-Expires=12345", link), {})[0] == 403
    for prompt, tokens in ((0, run.token_ids(0)), (7, run.token_ids(7))):
        assert tokens.tolist() == tiny_tokenizer()(PROMPTS[prompt])["input_ids"]
