"""Engine processes that sleep and wake as vLLM's server does, and end where a request comes while they sleep."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest

from streamtap.server.config import ModelConfig, ServerConfig, Timing
from streamtap.server.pool import parking
from streamtap.server.pool.endpoint import Endpoint
from streamtap.server.pool.engine_events import EngineEvent
from streamtap.server.pool.host_memory import Host, LocalHost, Memory
from streamtap.server.pool.pool import Pool

WORKER = (sys.executable, "-m", "streamtap.testing.fake_worker", "--port", "{port}", "--served-model-name", "{name}")
SLEEPY = "--enable-sleep-mode"


class _Roomy:
    """A machine that always has the memory."""

    def memory(self) -> Memory | None:
        return Memory(1000, 1000)

    async def weights_bytes(self, model: ModelConfig) -> int | None:
        return 1


@dataclass
class _Play:
    pool: Pool
    events: list[EngineEvent] = field(default_factory=list)

    async def use(self) -> Endpoint:
        """One completion."""
        async with self.pool.lease("m", "completions") as endpoint:
            assert (await _ask(endpoint, "POST", "/v1/completions")).status_code == 200
            self.pool.succeeded(endpoint)
            return endpoint

    async def until(self, stage: str) -> None:
        for _ in range(500):
            if self.pool.boot("m", "completions")["stage"] == stage:
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"never {stage}: {self.events}")

    def told(self) -> list[str]:
        return [event.kind for event in self.events]


def _play(
    folder: Path,
    part: Callable[[_Play], Awaitable[None]],
    *arguments: str,
    checkpoint: str = "org/model",
    idle_seconds: float = 0.3,
    host: Host | None = None,
) -> list[EngineEvent]:
    async def main() -> list[EngineEvent]:
        model = ModelConfig(
            id="m",
            checkpoint=checkpoint,
            engine="vllm",
            park=True,
            idle_seconds=idle_seconds,
            command=WORKER,
            arguments=arguments,
        )
        timing = Timing(restart_backoff_seconds=0.05, stop_seconds=5)
        events: list[EngineEvent] = []
        pool = Pool(
            ServerConfig(models=(model,), data_dir=folder, timing=timing),
            on_event=events.append,
            host=host or _Roomy(),
        )
        try:
            await part(_Play(pool, events))
        finally:
            await pool.close()
        return events

    return asyncio.run(asyncio.wait_for(main(), 60))


async def _ask(endpoint: Endpoint, method: str, path: str) -> httpx2.Response:
    body = {"model": endpoint.model, "prompt": [0, 69, 70], "max_tokens": 1}
    async with httpx2.AsyncClient(trust_env=False, headers=dict(endpoint.headers)) as client:
        return await client.request(method, endpoint.base_url + path, json=body if method == "POST" else None)


def _pid(endpoint: Endpoint) -> int:
    """The engine's process, which is not its keeper, by the port in its command line."""
    port = endpoint.base_url.rpartition(":")[2]
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().decode().split("\0")
        except OSError:
            continue
        if "streamtap.testing.fake_worker" in words and port in words and "streamtap.engines.keeper" not in words:
            return int(file.parent.name)
    raise AssertionError(f"no engine at port {port}")


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _model_folder(folder: Path) -> str:
    """A checkpoint whose weights take next to nothing."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    (folder / "model" / "model.safetensors").write_bytes(b"x" * 1000)
    return str(folder / "model")


def test_an_engine_sleeps_and_wakes_in_one_process(tmp_path: Path) -> None:
    async def part(play: _Play) -> None:
        first = await play.use()
        pid = _pid(first)
        await play.until("parked")
        assert (await _ask(first, "GET", "/is_sleeping")).json() == {"is_sleeping": True}
        assert await play.use() == first
        assert _pid(first) == pid
        assert (await _ask(first, "GET", "/is_sleeping")).json() == {"is_sleeping": False}
        await play.until("parked")
        assert play.told() == ["starting", "ready", "parked", "waking", "ready", "parked"]

    _play(tmp_path, part, SLEEPY, checkpoint=_model_folder(tmp_path), host=LocalHost())


def test_no_request_reaches_an_engine_that_sleeps(tmp_path: Path) -> None:
    """Bursts of requests around the moment at which it falls asleep: one that came too late would end the process."""
    chance = random.Random(6)

    async def part(play: _Play) -> None:
        for _ in range(25):
            endpoints = await asyncio.gather(*(play.use() for _ in range(chance.randint(1, 4))))
            assert {endpoint.generation for endpoint in endpoints} == {1}
            await asyncio.sleep(chance.uniform(0, 0.2))
        assert play.told().count("waking") > 3
        assert play.told().count("starting") == 1

    _play(tmp_path, part, SLEEPY, "--sleep-seconds", "0.05", "--wake-seconds", "0.05", idle_seconds=0.05)


def test_the_fake_ends_when_a_request_comes_while_it_sleeps(tmp_path: Path) -> None:
    async def part(play: _Play) -> None:
        endpoint = await play.use()
        await play.until("parked")
        with pytest.raises(httpx2.HTTPError):
            await _ask(endpoint, "POST", "/v1/completions")
        await play.until("cold")
        assert (play.events[-1].kind, play.events[-1].detail) == ("died", "it ended with status 71")
        assert (await play.use()).generation == 2

    _play(tmp_path, part, SLEEPY)


@pytest.mark.parametrize(
    ("arguments", "kind", "how"),
    [
        ((), "stopped", "idle, not parked: it answers 404 at /sleep?level=1, so it was started without sleep mode"),
        ((SLEEPY, "--sleep-fault", "sleep-fails"), "stopped", "idle, not parked: it answers 500 at /sleep?level=1"),
        ((SLEEPY, "--sleep-fault", "sleep-hangs"), "stopped", "idle, not parked: it took longer than 0 s"),
        ((SLEEPY, "--sleep-fault", "sleep-dies"), "died", "it ended with status 71"),
    ],
)
def test_an_engine_that_does_not_fall_asleep_ends_with_one_event(
    arguments: tuple[str, ...], kind: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "sleep-hangs" in arguments:
        monkeypatch.setattr(parking, "_SLEEP_SECONDS", 0.4)

    async def part(play: _Play) -> None:
        pid = _pid(await play.use())
        while _is_running(pid):
            await asyncio.sleep(0.02)
        assert (await play.use()).generation == 2

    events = _play(tmp_path, part, *arguments, "--sleep-seconds", "0.2")
    assert [event.kind for event in events][:5] == ["starting", "ready", kind, "starting", "ready"]
    assert events[2].detail.startswith(how)


@pytest.mark.parametrize("fault", ["wake-fails", "wake-hangs", "wake-lies", "wake-dies"])
def test_an_engine_that_does_not_wake_is_started_for_the_same_request(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault in ("wake-hangs", "wake-lies"):
        monkeypatch.setattr(parking, "_WAKE_SECONDS", 0.5)

    async def part(play: _Play) -> None:
        pid = _pid(await play.use())
        await play.until("parked")
        assert (await play.use()).generation == 2
        assert not _is_running(pid)

    events = _play(tmp_path, part, SLEEPY, "--sleep-fault", fault)
    assert [event.kind for event in events][:7] == [
        "starting",
        "ready",
        "parked",
        "waking",
        "died",
        "starting",
        "ready",
    ]


def test_kill_9_of_a_parked_engine_is_noticed_and_the_next_request_starts_it(tmp_path: Path) -> None:
    async def part(play: _Play) -> None:
        first = await play.use()
        await play.until("parked")
        os.kill(_pid(first), signal.SIGKILL)
        await play.until("cold")
        assert (play.events[-1].kind, play.events[-1].detail) == ("died", "it was ended by signal 9")
        assert (await play.use()).generation == 2

    _play(tmp_path, part, SLEEPY)


@pytest.mark.parametrize(("seconds", "stage"), [("0", "parked"), ("60", "parking")])
def test_closing_leaves_no_process(seconds: str, stage: str, tmp_path: Path) -> None:
    pids = []

    async def part(play: _Play) -> None:
        pids.append(_pid(await play.use()))
        await play.until(stage)
        assert _is_running(pids[0])

    began = time.monotonic()
    _play(tmp_path, part, SLEEPY, "--sleep-seconds", seconds)
    assert not _is_running(pids[0])
    assert time.monotonic() - began < 30


def test_kill_9_of_the_gateway_leaves_no_parked_engine(tmp_path: Path) -> None:
    fields: dict[str, Any] = {
        "id": "m",
        "checkpoint": _model_folder(tmp_path),
        "engine": "vllm",
        "park": True,
        "idle_seconds": 0.1,
        "command": (*WORKER, SLEEPY),
    }
    code = f"""
        import asyncio, sys
        from pathlib import Path
        from streamtap.server.config import ModelConfig, ServerConfig
        from streamtap.server.pool.pool import Pool

        async def main():
            pool = Pool(ServerConfig(models=(ModelConfig(**{fields!r}),), data_dir=Path({str(tmp_path)!r})))
            async with pool.lease("m", "completions") as endpoint:
                pass
            while pool.boot("m", "completions")["stage"] != "parked":
                await asyncio.sleep(0.05)
            sys.stdout.write(endpoint.base_url + "\\n")
            sys.stdout.flush()
            await asyncio.sleep(60)

        asyncio.run(main())
    """
    gateway = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    try:
        assert gateway.stdout is not None
        url = gateway.stdout.readline().strip()
        pid = _pid(Endpoint(url, {}, "m", "m", "completions", 1))
        assert _is_running(pid)
    finally:
        gateway.kill()
        gateway.communicate()
    end = time.monotonic() + 15
    while _is_running(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not _is_running(pid)
