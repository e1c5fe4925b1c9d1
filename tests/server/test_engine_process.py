from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from streamtap.errors import EngineDead, EngineFailed, EngineUnreachable, ServerRestarting
from streamtap.server.clock import SystemClock
from streamtap.server.config import ModelConfig, ServerConfig, Timing
from streamtap.server.pool import launching
from streamtap.server.pool.command_line import command_of
from streamtap.server.pool.endpoint import Endpoint
from streamtap.server.pool.engine_log import MOST_BYTES, EngineLog
from streamtap.server.pool.pool import Pool
from streamtap.server.pool.remote_engine import RemoteEngine

WORKER = (sys.executable, "-m", "streamtap.testing.fake_worker", "--port", "{port}", "--served-model-name", "{name}")
QUICK = Timing(restart_backoff_seconds=0.05, stop_seconds=5)


def _model(*arguments: str, **fields: Any) -> ModelConfig:
    return ModelConfig(id="m", checkpoint="org/model", command=WORKER, arguments=arguments, **fields)


def _play(folder: Path, model: ModelConfig, part: Callable[[Pool], Awaitable[None]], timing: Timing = QUICK) -> None:
    async def main() -> None:
        pool = Pool(ServerConfig(models=(model,), data_dir=folder, timing=timing))
        try:
            await part(pool)
        finally:
            await pool.close()

    asyncio.run(asyncio.wait_for(main(), 60))


async def _get(endpoint: Endpoint, path: str, **options: Any) -> httpx2.Response:
    async with httpx2.AsyncClient(trust_env=False) as client:
        return await client.get(endpoint.base_url + path, **options)


async def _until_it_breaks(endpoint: Endpoint) -> None:
    for _ in range(100):
        await _get(endpoint, "/health")


def _listener(endpoint: Endpoint) -> int:
    """Id of the process that listens there."""
    return _listeners()[int(endpoint.base_url.rpartition(":")[2])]


def _listeners() -> dict[int, int]:
    inodes = {}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A":
            inodes[f"socket:[{fields[9]}]"] = int(fields[1].rpartition(":")[2], 16)
    found = {}
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            port = inodes.get(os.readlink(link))
        except OSError:
            continue
        if port is not None:
            found[port] = int(link.parts[2])
    return found


def _is_running(process_id: int) -> bool:
    return _about(process_id)[0] not in ("", "Z")


def _about(process_id: int) -> tuple[str, int]:
    """State and parent of a process; nothing of one that is gone."""
    try:
        state, parent = Path(f"/proc/{process_id}/stat").read_text().rpartition(") ")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return "", 0
    return state, int(parent)


def _our_engines() -> set[int]:
    """Fake engines that listen under this process; tests in another one have theirs at the same time."""
    return {each for each in _listeners().values() if b"fake_worker" in _command(each) and _is_ours(each)}


def _command(process_id: int) -> bytes:
    try:
        return Path(f"/proc/{process_id}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def _is_ours(process_id: int) -> bool:
    while process_id > 1 and process_id != os.getpid():
        process_id = _about(process_id)[1]
    return process_id == os.getpid()


def _until(condition: Callable[[], bool], seconds: float = 10) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def test_an_engine_starts_answers_with_its_key_and_stops(tmp_path: Path) -> None:
    async def part(pool: Pool) -> None:
        async with pool.lease("m", "completions") as endpoint:
            answer = await _get(endpoint, "/v1/models", headers=dict(endpoint.headers))
            assert answer.json()["data"][0]["id"] == endpoint.model == "org/model"
            assert (await _get(endpoint, "/v1/models")).status_code == 401
            engine = _listener(endpoint)
        await pool.close()
        assert not _is_running(engine)
        log = (tmp_path / "logs" / "m-completions.log").read_text()
        assert "engine of m for completions, start 1" in log
        assert endpoint.headers["Authorization"].removeprefix("Bearer ") not in log

    _play(tmp_path, _model(), part)


def test_stages_are_those_that_the_engine_tells(tmp_path: Path) -> None:
    async def part(pool: Pool) -> None:
        async def use() -> None:
            async with pool.lease("m", "completions"):
                return

        user = asyncio.ensure_future(use())
        seen = []
        while not user.done():
            label = pool.boot("m", "completions")["stage_label"]
            if label not in seen:
                seen.append(label)
            await asyncio.sleep(0.01)
        await user
        wanted = ["Starting the engine's process", "Loading the weights", "Warming up"]
        assert [label for label in seen if label in wanted] == wanted

    _play(tmp_path, _model("--start-seconds", "1"), part)


def test_after_kill_9_of_the_engine_the_next_lease_works(tmp_path: Path) -> None:
    async def part(pool: Pool) -> None:
        async with pool.lease("m", "activations") as first:
            os.kill(_listener(first), signal.SIGKILL)
            with pytest.raises(httpx2.HTTPError):
                await _until_it_breaks(first)
            pool.failed(first, EngineDead("gone"))
        async with pool.lease("m", "activations") as second:
            assert second.base_url != first.base_url
            assert second.generation == 2
            assert (await _get(second, "/health")).status_code == 200

    _play(tmp_path, _model(), part)


def test_a_start_that_fails_says_how_far_it_came_and_leaves_nothing(tmp_path: Path) -> None:
    async def part(pool: Pool) -> None:
        with pytest.raises(
            EngineDead, match="the engine of 'm' for completions could not be started: .*; its log says why"
        ):
            async with pool.lease("m", "completions"):
                pass
        assert pool.states()[0]["state"] == "failed"

    _play(tmp_path, _model("--fail-start", "--start-seconds", "0.3"), part)
    assert "told not to start" in (tmp_path / "logs" / "m-completions.log").read_text()


@pytest.mark.parametrize(
    ("command", "how"),
    [
        (("no-such-program", "{port}"), "it ended with status 127"),
        (("sh", "-c", "kill -9 $$ {port}"), "ended by signal 9"),
    ],
)
def test_a_process_that_ends_at_once_is_not_waited_for(tmp_path: Path, command: tuple[str, ...], how: str) -> None:
    async def part(pool: Pool) -> None:
        with pytest.raises(EngineDead, match=f'{how} at "Starting the engine\'s process"'):
            async with pool.lease("m", "completions"):
                pass

    _play(tmp_path, ModelConfig(id="m", checkpoint="org/model", command=command), part)


def test_a_start_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    async def part(pool: Pool) -> None:
        with pytest.raises(EngineUnreachable, match="was not ready in time: it still stands at"):
            async with pool.lease("m", "completions"):
                pass

    _play(tmp_path, _model("--start-seconds", "60"), part, Timing(start_seconds=0.6, stop_seconds=5))


def test_closing_in_the_middle_of_a_start_leaves_nothing(tmp_path: Path) -> None:
    engines: set[int] = set()

    async def part(pool: Pool) -> None:
        async def use() -> None:
            async with pool.lease("m", "completions"):
                pass

        user = asyncio.ensure_future(use())
        while pool.boot("m", "completions")["stage"] != "loading_weights":
            await asyncio.sleep(0.02)
        engines.update(_our_engines() - before)
        await pool.close()
        with pytest.raises(ServerRestarting):
            await user

    before = _our_engines()
    _play(tmp_path, _model("--start-seconds", "60"), part)
    assert len(engines) == 1
    assert not any(map(_is_running, engines))


def test_another_port_is_taken_when_the_first_is_not_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        taken = held.getsockname()[1]
        ports = iter([taken])
        free_port = launching.free_port
        monkeypatch.setattr(launching, "free_port", lambda: next(ports, None) or free_port())

        async def part(pool: Pool) -> None:
            async with pool.lease("m", "completions") as endpoint:
                assert not endpoint.base_url.endswith(f":{taken}")

        # The listener never answers, so that what ends first is the process that cannot have the port.
        monkeypatch.setattr("streamtap.server.pool.engine_health._SECONDS", 0.2)
        _play(tmp_path, _model(), part)


def test_kill_9_of_the_gateway_leaves_no_engine(tmp_path: Path) -> None:
    code = f"""
        import asyncio, sys
        from pathlib import Path
        from streamtap.server.config import ModelConfig, ServerConfig
        from streamtap.server.pool.pool import Pool

        async def main():
            model = ModelConfig(id="m", checkpoint="org/model", command={WORKER!r})
            pool = Pool(ServerConfig(models=(model,), data_dir=Path({str(tmp_path)!r})))
            async with pool.lease("m", "completions") as one, pool.lease("m", "activations") as two:
                sys.stdout.write(one.base_url + " " + two.base_url + "\\n")
                sys.stdout.flush()
                await asyncio.sleep(60)

        asyncio.run(main())
    """
    gateway = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    try:
        assert gateway.stdout is not None
        ports = [int(url.rpartition(":")[2]) for url in gateway.stdout.readline().split()]
        engines = [_listeners()[port] for port in ports]
        assert len(engines) == 2
        assert all(map(_is_running, engines))
    finally:
        gateway.kill()
        gateway.communicate()

    assert _until(lambda: not any(map(_is_running, engines)))


def test_an_engine_elsewhere_is_asked_with_its_key(tmp_path: Path) -> None:
    async def part(pool: Pool) -> None:
        async with pool.lease("m", "completions") as engine:
            key = tmp_path / "key"
            key.write_text(engine.headers["Authorization"].removeprefix("Bearer ") + "\n")
            (tmp_path / "wrong").write_text("wrong")
            await _use_elsewhere(tmp_path, engine.base_url + "/v1/", key)
            with pytest.raises(EngineFailed, match="refuses the key of this service"):
                await _use_elsewhere(tmp_path, engine.base_url, tmp_path / "wrong")
            for text in ("schlüssel", "two\nlines", "\n"):
                (tmp_path / "wrong").write_text(text, encoding="utf-8")
                with pytest.raises(EngineFailed, match=r"holds no key in one line of ASCII\.$"):
                    await _use_elsewhere(tmp_path, engine.base_url, tmp_path / "wrong")
        await pool.close()
        with pytest.raises(EngineUnreachable, match="does not answer at its address"):
            await _use_elsewhere(tmp_path, engine.base_url, key)
        with pytest.raises(EngineFailed, match="the file of its key cannot be read: No such file"):
            await _use_elsewhere(tmp_path, engine.base_url, tmp_path / "none")

    _play(tmp_path, _model(), part)


async def _use_elsewhere(folder: Path, url: str, key: Path) -> None:
    remote = ModelConfig(id="far", checkpoint="org/model", engine="url", url=url, api_key_file=key)
    pool = Pool(ServerConfig(models=(remote,), data_dir=folder), clock=SystemClock())
    try:
        async with pool.lease("far", "activations") as endpoint:
            assert endpoint.base_url == url.rstrip("/").removesuffix("/v1")
            assert (await _get(endpoint, "/v1/models", headers=dict(endpoint.headers))).status_code == 200
    finally:
        await pool.close()


def test_a_long_log_is_put_aside_while_it_is_written(tmp_path: Path) -> None:
    log = EngineLog(tmp_path / "logs" / "m.log")
    with log.open(SystemClock().now(), "engine of m") as file:
        file.write(b"x" * MOST_BYTES)
        log.rotate()
        file.write(b"after\n")
        log.rotate()

    assert (tmp_path / "logs" / "m.log").read_bytes() == b"after\n"
    assert (tmp_path / "logs" / "m.log.old").stat().st_size > MOST_BYTES
    assert sorted(each.name for each in (tmp_path / "logs").iterdir()) == ["m.log", "m.log.old"]


def test_command_lines_say_all_that_the_table_says() -> None:
    ours = ModelConfig(
        id="m", checkpoint="org/model", revision="abc", device="cpu", max_batch_tokens=512, arguments=("--x",)
    )
    assert " ".join(command_of(ours, 80)[1:]) == (
        "-m streamtap.engines.worker --model org/model --served-model-name org/model --host 127.0.0.1 --port 80 "
        "--revision abc --dtype auto --device cpu --max-batch-tokens 512 --x"
    )
    vllm = ModelConfig(id="m", checkpoint="/models/x", name="org/x", engine="vllm", dtype="bfloat16", max_model_len=99)
    assert " ".join(command_of(vllm, 80)) == (
        "vllm serve /models/x --served-model-name org/x --host 127.0.0.1 --port 80 --dtype bfloat16 --max-model-len 99 "
        "--max-logprobs=-1 --no-enable-prefix-caching --no-enable-chunked-prefill"
    )
    assert "--no-enable-prefix-caching" not in command_of(vllm, 80, "completions")
    own = ModelConfig(id="m", checkpoint="org/model", name="n", command=("run", "{model}:{name}", "{{}}", "--p={port}"))
    assert command_of(own, 80) == ["run", "org/model:n", "{}", "--p=80"]


def test_an_engine_that_was_given_up_meanwhile_does_not_answer() -> None:
    async def main() -> bool:
        engine = RemoteEngine(Endpoint("http://127.0.0.1:9", {}, "org/x", "m", "completions", 1))
        await engine.stop()
        return await engine.answers()

    assert asyncio.run(main()) is False
