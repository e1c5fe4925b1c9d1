"""`streamtap harvest submit` and what follows it, over HTTP on this machine."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from streamtap.cli.main import main
from streamtap.client.harvests import HarvestJob
from streamtap.harvested.reader import HarvestedRun
from streamtap.testing.stub_harvests import KEY, Asked, StubHarvests

PROMPTS = [f"prompt {i}" for i in range(7)]


class _Server(ThreadingHTTPServer):
    """A stub of the service behind a port; the same port serves the files, as the service's own folder would."""

    stub: StubHarvests

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, _Server)
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        reply = self.server.stub.answer(self.command, self.path, dict(self.headers), body)
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(reply.body)))
        self.end_headers()
        self.wfile.write(reply.body)

    do_POST = do_DELETE = do_GET  # noqa: N815, the library's names

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture(scope="module")
def running() -> Iterator[_Server]:
    with _Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def stub(running: _Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StubHarvests:
    running.stub = StubHarvests(tmp_path / "server", files=running.base)
    monkeypatch.setenv("STREAMTAP_API_BASE", f"{running.base}/v1")
    monkeypatch.setenv("STREAMTAP_API_KEY", KEY)
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text("\n".join(PROMPTS), encoding="utf-8")
    return running.stub


def _run(*arguments: Any, **more: Any) -> Result:
    return CliRunner().invoke(main, ["harvest", *map(str, arguments)], **more)


def test_from_a_file_of_prompts_to_a_folder_of_rows(stub: StubHarvests) -> None:
    submitted = _run("submit", "prompts.txt", "--model", "stub", "--layers", "0,2-3", "--shard-size", 3)
    job_id = submitted.stdout.strip()
    waited = _run("wait", job_id)
    fetched = _run("download", job_id, "--out", "run")

    assert (submitted.exit_code, waited.exit_code, fetched.exit_code) == (0, 0, 0), submitted.output + fetched.output
    assert job_id == "job-0"
    assert "streamtap harvest wait job-0" in submitted.stderr
    assert "done: 7 prompts in 3 files" in waited.stderr
    run = HarvestedRun.open("run")
    run.verify()
    assert (len(run), run.layers) == (7, (0, 2, 3))
    assert run.token_ids(6).tolist() == stub.engine.tokenizer.tokenizer(PROMPTS[6])["input_ids"]


def test_how_far_it_is_may_be_shown(stub: StubHarvests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMTAP_PROGRESS", "on")
    stub.looks = 2

    result = _run("submit", "prompts.txt", "--model", "stub", "--out", "run")

    assert result.exit_code == 0, result.output
    assert "harvesting" in result.stderr
    assert "7/7" in result.stderr
    assert "downloading" in result.stderr


def test_one_command_may_do_it_all(stub: StubHarvests) -> None:
    np.save("directions.npy", np.eye(8)[:2])
    Path("prompts.jsonl").write_text('{"id": 1, "text": "abc"}\n{"id": 2, "text": "bc"}\n', encoding="utf-8")
    options = ("--project-onto", "directions.npy", "--positions", "0,-1", "--no-special-tokens", "--batch-size", 2)

    result = _run("submit", "prompts.jsonl", "--model", "stub", *options, "--out", "run")

    assert result.exit_code == 0, result.output
    assert result.stdout == "job-0\n"
    run = HarvestedRun.open("run")
    assert (run.manifest.contents, run.width, run.manifest.add_special_tokens) == ("projections", 2, False)
    assert run.positions(1).tolist() == [0, 1]
    assert stub.requests["job-0"].batch_size == 2


def test_token_ids_and_pooling(stub: StubHarvests) -> None:
    Path("ids.jsonl").write_text("[5, 6, 7]\n[8]\n", encoding="utf-8")

    result = _run("submit", "ids.jsonl", "--model", "stub", "--pooling", "mean", "--limit", 1, "--wait")

    assert result.exit_code == 0, result.output
    asked = stub.requests["job-0"]
    assert (asked.prompts, asked.pooling, asked.layers) == (((5, 6, 7),), "mean", None)


def test_prompts_of_standard_input(stub: StubHarvests) -> None:
    assert _run("submit", "-", "--model", "stub", input="one\ntwo\n").exit_code == 0

    assert stub.requests["job-0"].prompts == ("one", "two")


def test_more_prompts_than_a_job_takes(stub: StubHarvests) -> None:
    stub.most_prompts, stub.slots = 4, 1

    submitted = _run("submit", "prompts.txt", "--model", "stub")
    ids = submitted.stdout.split()
    fetched = _run("download", *ids, "--out", "runs")

    assert (submitted.exit_code, fetched.exit_code) == (0, 0), submitted.output + fetched.output
    assert ids == [f"job-{i}" for i in range(len(ids))]
    assert "1 job taken; 4 prompts wait for a slot, and this command with them" in submitted.stderr
    assert [text for request in stub.requests.values() for text in request.prompts] == PROMPTS
    run = HarvestedRun.open("runs")
    run.verify()
    assert len(run) == 7
    assert run.token_ids(6).tolist() == stub.engine.tokenizer.tokenizer(PROMPTS[6])["input_ids"]


def test_a_command_that_is_stopped_says_what_was_submitted(stub: StubHarvests) -> None:
    stub.most_prompts, stub.slots, stub.looks = 4, 1, 50

    def before(asked: Asked) -> None:
        if asked.method == "POST" and "job-0" in stub.jobs:
            stub.broken = "stopped"
            stub.looks = 1

    stub.before = before
    result = _run("submit", "prompts.txt", "--model", "stub")

    assert result.exit_code == 1
    assert result.stdout == "job-0\n"
    assert "only the first 3 prompts of 7 were submitted" in result.stderr
    assert "error: harvest job-0 failed: stopped" in result.stderr


def test_jobs_taken_before_one_that_is_refused_are_named(stub: StubHarvests) -> None:
    stub.most_tokens = 20
    Path("two.txt").write_text("short\na text of far more tokens than twenty\n")

    result = _run("submit", "two.txt", "--model", "stub")

    assert result.exit_code == 1
    assert "begins with prompt 1 of the harvest; the jobs before it go on: job-0." in result.stderr


def test_where_jobs_stand(stub: StubHarvests) -> None:
    stub.looks = 3
    _run("submit", "prompts.txt", "--model", "stub")
    _run("submit", "prompts.txt", "--model", "stub", "--limit", 2)

    status, listed = _run("status", "job-0"), _run("list")
    as_json = json.loads(_run("status", "job-0", "job-1", "--json").stdout)

    assert status.stdout.splitlines()[0].split() == ["id", "model", "state", "prompts", "submitted", "ended"]
    assert status.stdout.splitlines()[1].split()[:4] == ["job-0", "stub", "running", "1/7"]
    assert [line.split()[0] for line in listed.stdout.splitlines()] == ["id", "job-1", "job-0"]
    assert [(job["job_id"], job["progress"]["prompts_done"]) for job in as_json] == [("job-0", 3), ("job-1", 0)]


def test_nothing_to_list(stub: StubHarvests) -> None:
    assert _run("list").stdout == "no jobs\n"
    assert json.loads(_run("list", "--json").stdout) == []


def test_a_job_is_cancelled(stub: StubHarvests) -> None:
    stub.looks = 9
    _run("submit", "prompts.txt", "--model", "stub")

    first, second = _run("cancel", "job-0"), _run("cancel", "job-0")
    waited = _run("wait", "job-0")

    assert (first.exit_code, second.exit_code, waited.exit_code) == (0, 1, 1)
    assert "cancelled" in first.stdout
    assert "error: job job-0 is cancelled already." in second.stderr
    assert "error: harvest job-0 was cancelled." in waited.stderr


def test_a_job_that_failed(stub: StubHarvests) -> None:
    stub.broken = "the checkpoint cannot be loaded."
    _run("submit", "prompts.txt", "--model", "stub")

    waited, status = _run("wait", "job-0"), _run("status", "job-0")

    assert (waited.exit_code, status.exit_code) == (1, 0)
    assert "error: harvest job-0 failed: the checkpoint cannot be loaded." in waited.stderr
    assert "job-0 failed: the checkpoint cannot be loaded." in status.stderr


def test_a_wait_has_an_end(stub: StubHarvests) -> None:
    stub.looks = 99
    _run("submit", "prompts.txt", "--model", "stub")

    waited = _run("wait", "job-0", "--timeout", 0.2)

    assert waited.exit_code == 1
    assert "harvest job-0 is running after 0.2 s; it goes on." in waited.stderr


def test_a_wait_that_is_stopped_leaves_the_job(stub: StubHarvests, monkeypatch: pytest.MonkeyPatch) -> None:
    _run("submit", "prompts.txt", "--model", "stub")

    def stopped(*_: Any, **_more: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(HarvestJob, "wait", stopped)
    result = _run("wait", "job-0")

    assert result.exit_code == 1
    assert "the harvest goes on; `streamtap harvest wait job-0` waits again." in result.stderr
    assert [asked.method for asked in stub.asked if asked.method == "DELETE"] == []


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["submit", "prompts.txt"], 2, "Missing option '--model'"),
        (["submit", "none.txt", "--model", "stub"], 1, "No such file or directory"),
        (["submit", "prompts.txt", "--model", "other"], 2, "there is no model other"),
        (["submit", "prompts.txt", "--model", "stub", "--layers", "9"], 2, "layer"),
        (["submit", "prompts.txt", "--model", "stub", "--positions", "-5:"], 2, "all, last, or numbers"),
        (["submit", "prompts.txt", "--model", "stub", "--project-onto", "prompts.txt"], 2, "not an .npy file"),
        (["submit", "prompts.txt", "--model", "stub", "--project-onto", "none.npy"], 2, "cannot be read"),
        (["submit", "chat.jsonl", "--model", "stub"], 2, "prompt 0 is a chat"),
        (["status", "job-7"], 1, "there is no harvest job of that id"),
        (["download", "job-7", "--out", "x"], 1, "there is no harvest job of that id"),
        (["download", "job-7"], 2, "Missing option '--out'"),
        (["wait"], 2, "Missing argument 'ID...'"),
    ],
)
def test_what_cannot_be_is_one_sentence(stub: StubHarvests, arguments: list[str], status: int, message: str) -> None:
    Path("chat.jsonl").write_text('[{"role": "user", "content": "hi"}]\n', encoding="utf-8")

    result = _run(*arguments)

    assert result.exit_code == status, result.output
    assert message in " ".join(result.stderr.split())
    assert stub.jobs == {}
    assert "secret" not in result.output


def test_no_server_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STREAMTAP_API_BASE", raising=False)

    result = _run("list")

    assert result.exit_code == 2
    assert "error: no server was named" in result.stderr
