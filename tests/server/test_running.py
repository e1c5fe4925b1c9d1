"""The whole service as processes: `streamtap serve` over fake engine processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from streamtap.server.running import beat
from streamtap.testing.fake_clock import FakeClock
from streamtap.testing.stub_engine import StubPool
from streamtap.testing.stub_gateway import StubGateway
from streamtap.wire.completions import read_safetensors

CONFIG = """
port = 0
[timing]
first_answer_seconds = 0.3
keepalive_seconds = 0.3
stop_seconds = {stop_seconds}
[[models]]
id = "fake"
checkpoint = "org/fake"
n_layers = 4
hidden_size = 8
vocabulary = 97
max_model_len = 2048
command = [{python}, "-m", "streamtap.testing.fake_worker", "--port", "{{port}}", "--served-model-name", "{{name}}",
           "--token-seconds", "{token_seconds}"]
"""


class Server:
    """A gateway in a process of its own."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        told = {"stop_seconds": 20, "token_seconds": 0, **settings}
        (folder / "streamtap.toml").write_text(CONFIG.format(python=json.dumps(sys.executable), **told))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "streamtap", "serve"],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=(folder / "log").open("ab"),
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
        )
        self.said = ""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said += line
            if "Ctrl-C" in line:
                break
        assert "Ctrl-C" in self.said, (folder / "log").read_text()
        self.base_url = re.search(r"http://\S+/v1", self.said)[0]  # type: ignore[index]
        found = re.search(r"stp_\w+", self.said)
        self.key = found[0] if found else None

    def client(self, key: str | None) -> httpx2.Client:
        return httpx2.Client(
            base_url=self.base_url, headers={"Authorization": f"Bearer {key}"}, timeout=60, trust_env=False
        )

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextlib.contextmanager
def _running(folder: Path, **settings: Any) -> Iterator[Server]:
    server = Server(folder, **settings)
    try:
        yield server
    finally:
        if server.process.poll() is None:
            server.stop()
        assert server.process.stdout is not None
        server.process.stdout.close()


def test_from_the_first_key_to_the_stop(tmp_path: Path) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 2, "output_residual_stream": [1, 3]}
    with _running(tmp_path) as server:
        with server.client(server.key) as client:
            cold = client.post("/completions", json=body)
            # Its engine took longer than the first answer may.
            assert (cold.status_code, cold.content[:1]) == (200, b" ")
            assert cold.json()["activations"]["residual_stream"]["shape"] == [2, 4, 8]
            warm = client.post("/completions", json=body, headers={"Accept": "application/vnd.safetensors"})
            assert read_safetensors(warm.content).activations.layers == (1, 3)
            with client.stream(
                "POST", "/completions", json={"prompt": [40, 41], "max_tokens": 3, "stream": True}
            ) as stream:
                events = [line for line in stream.iter_lines() if line.startswith("data:")]
            assert events[-1] == "data: [DONE]"
            used = client.get("/usage").json()["usage"]
            assert (used["monthly_activations"]["used"], used["monthly_output_tokens"]["used"]) == (2, 7)
            health = client.get(server.base_url.removesuffix("/v1") + "/health").json()
            assert {engine["state"] for engine in health["engines"]} == {"ready"}
        assert server.stop() == 0

    log = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    requests = [line for line in log if line["event"] == "request" and line["endpoint"] == "/v1/completions"]
    assert [line["status"] for line in requests] == [200, 200, 200]
    assert server.key is not None
    assert server.key not in (tmp_path / "log").read_text()
    with _running(tmp_path) as again:
        assert again.key is None


@pytest.mark.parametrize(("stop_seconds", "code"), [(20, None), (0.5, "server_restarting")])
def test_a_stop_lets_what_runs_end_or_says_so(stop_seconds: float, code: str | None, tmp_path: Path) -> None:
    answers: list[httpx2.Response] = []
    with (
        _running(tmp_path, stop_seconds=stop_seconds, token_seconds=0.4) as server,
        server.client(server.key) as client,
    ):
        client.post("/completions", json={"prompt": [40], "max_tokens": 1})
        slow = threading.Thread(
            target=lambda: answers.append(client.post("/completions", json={"prompt": [40, 42], "max_tokens": 8}))
        )
        with server.client(server.key) as other:
            other.get("/usage")
            slow.start()
            while other.get("/usage").json()["requests"]["active"]["now"] == 0:
                time.sleep(0.02)
            server.process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + 20
            while (late := other.get("/usage")).status_code != 503:
                assert time.monotonic() < deadline
        assert late.json()["error"]["code"] == "server_restarting"
        assert int(late.headers["retry-after"]) > 0
        slow.join()
        assert server.process.wait(60) == 0
        assert server.process.stdout is not None
        assert f"Waiting up to {stop_seconds:g} s for " in server.process.stdout.read()

    answer = answers[0].json()
    assert answer.get("error", {}).get("code") == code
    assert code is not None or len(answer["choices"][0]["text"]) > 0


def test_a_port_that_is_taken_is_said_in_one_sentence(tmp_path: Path) -> None:
    with _running(tmp_path) as server:
        port = server.base_url.removesuffix("/v1").rpartition(":")[2]
        done = subprocess.run(
            [sys.executable, "-m", "streamtap", "serve", "--port", port, "--data-dir", str(tmp_path / "other")],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2
        assert f"error: port {port} of 127.0.0.1 cannot be used" in done.stderr
        assert "stp_" not in done.stdout


def test_a_second_gateway_on_one_data_folder_is_refused(tmp_path: Path) -> None:
    """It would take the first for its dead predecessor and give away the slots of what still runs there."""
    with _running(tmp_path):
        done = subprocess.run(
            [sys.executable, "-m", "streamtap", "serve", "--port", "0"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2
        assert "another gateway uses data_dir" in done.stderr


def test_a_database_that_fails_for_a_while_does_not_end_the_heartbeat(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> list[str]:
        clock, beats = FakeClock(), []
        gateway = StubGateway(tmp_path, StubPool(), clock=clock)

        def sweep() -> int:
            beats.append("beat")
            if len(beats) == 1:
                raise OSError("the database is gone")
            return 0

        gateway.ledger.sweep = sweep  # type: ignore[method-assign]
        beating = asyncio.ensure_future(beat(gateway.app.state.service.admission, clock))
        for count in (1, 2):
            await clock.advance(10)
            async with asyncio.timeout(10):
                while len(beats) < count or not clock.sleepers:
                    await asyncio.sleep(0.002)
        beating.cancel()
        await gateway.close()
        return beats

    with caplog.at_level("INFO", logger="streamtap"):
        assert asyncio.run(main()) == ["beat", "beat"]
    assert [record.message for record in caplog.records] == ["sweep_failed"]
