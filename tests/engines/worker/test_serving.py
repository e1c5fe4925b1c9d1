"""Engine processes as they are: started, asked, told to stop, and dying."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

FAKE = "streamtap.testing.fake_worker"


class Process:
    """An engine process and a client of it."""

    def __init__(self, module: str, arguments: tuple[str, ...], log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.client = httpx2.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=30)
        self.log = log
        command = [sys.executable, "-m", module, "--port", str(self.port), *arguments]
        environment = {**os.environ, "STREAMTAP_WORKER_KEY": "tell-nobody"}
        with log.open("wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)

    def health(self) -> tuple[int, dict[str, Any]]:
        try:
            answer = self.client.get("/health")
        except httpx2.TransportError:
            return 0, {}
        return answer.status_code, answer.json()

    def post(self, **body: Any) -> httpx2.Response:
        asked = {"prompt": "hello", "max_tokens": 1, "temperature": 0, **body}
        return self.client.post("/v1/completions", json=asked, headers={"Authorization": "Bearer tell-nobody"})

    def until(self, said: Callable[[], bool], seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not said():
            assert time.monotonic() < end, self.log.read_text()
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.02)

    def until_ready(self) -> None:
        self.until(lambda: self.health()[0] == 200)


@contextmanager
def process(log: Path, *arguments: str, module: str = FAKE) -> Iterator[Process]:
    found = Process(module, arguments, log)
    try:
        yield found
    finally:
        found.client.close()
        found.process.kill()
        found.process.wait()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def test_stages_are_told_while_it_loads(log: Path) -> None:
    with process(log, "--start-seconds", "1") as worker:
        seen: list[str] = []

        def is_ready() -> bool:
            status, view = worker.health()
            if view:
                assert set(view) == {"stage", "stage_label", "stage_age_s", "live"}
                assert (status == 200) == (view["stage"] == "ready")
                seen.append(view["stage"])
            return status == 200

        worker.until(is_ready)

    # The first may be over before anyone can ask.
    assert [stage for stage in dict.fromkeys(seen) if stage != "starting"] == ["loading_weights", "warming_up", "ready"]


def test_an_idle_process_ends_at_once_and_well(log: Path) -> None:
    with process(log) as worker:
        worker.until_ready()
        assert worker.post().status_code == 200
        assert worker.client.get("/v1/models").status_code == 401
        worker.process.send_signal(signal.SIGTERM)

        assert worker.process.wait(5) == 0
    assert "tell-nobody" not in log.read_text()
    assert "hello" not in log.read_text()
    assert "6 + 1 tokens" in log.read_text()


def test_what_runs_is_finished_and_what_comes_is_refused(log: Path) -> None:
    with process(log, "--token-seconds", "0.1") as worker, ThreadPoolExecutor(1) as threads:
        worker.until_ready()
        running = threads.submit(worker.post, max_tokens=15)
        worker.until(lambda: worker.health()[1]["live"] == 1)
        worker.process.send_signal(signal.SIGTERM)
        worker.until(lambda: "told to stop" in log.read_text())
        refused = worker.post()

        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "server_restarting")
        assert running.result(20).json()["usage"]["completion_tokens"] == 15
        assert worker.process.wait(5) == 0


def test_what_outlasts_the_grace_is_told(log: Path) -> None:
    with process(log, "--token-seconds", "30", "--grace-seconds", "0.2") as worker, ThreadPoolExecutor(1) as threads:
        worker.until_ready()
        running = threads.submit(worker.post)
        worker.until(lambda: worker.health()[1]["live"] == 1)
        worker.process.send_signal(signal.SIGTERM)
        answer = running.result(20)

        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "server_restarting")
        assert worker.process.wait(5) == 0


def test_a_second_signal_ends_the_grace(log: Path) -> None:
    with process(log, "--token-seconds", "30") as worker, ThreadPoolExecutor(1) as threads:
        worker.until_ready()
        running = threads.submit(worker.post)
        worker.until(lambda: worker.health()[1]["live"] == 1)
        worker.process.send_signal(signal.SIGTERM)
        worker.until(lambda: "told to stop" in log.read_text())
        worker.process.send_signal(signal.SIGTERM)

        assert running.result(10).json()["error"]["code"] == "server_restarting"
        assert worker.process.wait(5) == 0


def test_it_ends_in_the_middle_of_loading(log: Path) -> None:
    with process(log, "--start-seconds", "60") as worker:
        worker.until(lambda: worker.health()[0] == 503)
        worker.process.send_signal(signal.SIGTERM)

        assert worker.process.wait(5) == 0


def test_a_failed_start_is_told_before_the_process_ends(log: Path) -> None:
    with process(log, "--fail-start", "--failed-seconds", "1") as worker:
        worker.until(lambda: worker.health()[0] == 500)
        error = worker.health()[1]["error"]

        assert error["message"] == "the fake engine was told not to start."
        assert worker.process.wait(10) == 1


@pytest.mark.parametrize("more", [(), ("--die-after", "1")], ids=["fault", "after"])
def test_a_process_that_dies_breaks_the_connection(log: Path, more: tuple[str, ...]) -> None:
    with process(log, "--token-seconds", "0.05", *(more or ("--fault", "die"))) as worker:
        worker.until_ready()
        if more:
            assert worker.post().status_code == 200
        with pytest.raises(httpx2.TransportError):
            worker.post()

        assert worker.process.wait(5) == 70


def test_a_port_that_is_taken_is_a_failure(log: Path) -> None:
    with process(log) as worker:
        worker.until_ready()
        command = [sys.executable, "-m", FAKE, "--port", str(worker.port)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert ran.returncode == 3
    assert "address already in use" in ran.stderr
