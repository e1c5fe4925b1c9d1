"""Log lines: names and counts, never content."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from streamtap.server.log import JsonLines, note
from streamtap.testing.stub_engine import StubEngine, StubPool
from streamtap.testing.stub_gateway import StubGateway


def test_a_request_is_one_line_without_key_prompt_or_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with StubEngine() as engine, caplog.at_level("INFO", logger="streamtap"):

        async def main() -> str:
            gateway = StubGateway(tmp_path, StubPool(engine.base_url))
            await gateway.ask({"prompt": "my secret", "max_tokens": 1}, x_request_id="one")
            await gateway.ask({"prompt": "my secret", "n": 99}, x_request_id="two")
            await gateway.close()
            return gateway.key

        key = asyncio.run(main())

    lines = [JsonLines().format(record) for record in caplog.records if record.name == "streamtap.server"]
    good, bad = (json.loads(line) for line in lines)
    assert {name: good[name] for name in ("event", "request_id", "endpoint", "key", "model", "status")} == {
        "event": "request",
        "request_id": "one",
        "endpoint": "/v1/completions",
        "key": key[:12],
        "model": "stub",
        "status": 200,
    }
    assert (good["input_tokens"], good["output_tokens"]) == (2, 1)
    assert good["seconds"] >= 0
    assert (bad["request_id"], bad["status"], bad["code"]) == ("two", 400, "invalid_request")
    assert "secret" not in "".join(lines)
    assert key not in "".join(lines)


def test_of_an_exception_only_the_class_is_logged() -> None:
    try:
        raise ValueError("a prompt")
    except ValueError:
        record = logging.getLogger("uvicorn.error").makeRecord(
            "uvicorn.error", logging.ERROR, __file__, 1, "Exception in ASGI application\n", (), sys.exc_info()
        )

    line = JsonLines().format(record)

    assert json.loads(line)["error"] == "ValueError"
    assert "a prompt" not in line
    assert "\n" not in line


def test_an_event_has_its_fields(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="streamtap"):
        note("stopping", running=3)

    line = json.loads(JsonLines().format(caplog.records[-1]))
    assert (line["event"], line["running"], line["level"]) == ("stopping", 3, "info")


FAULTS = """
import asyncio, logging
from streamtap.server.log import log_to_stderr, note
log_to_stderr()
note("ready", engines=2)

async def fails():
    raise ValueError("my secret")

async def main():
    task = asyncio.ensure_future(fails())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    del task

asyncio.run(main())
logging.getLogger("uvicorn.error").info("started")
try:
    raise KeyError("my secret")
except KeyError:
    logging.getLogger("uvicorn.error").error("fault", exc_info=True)
    logging.getLogger("some.library").warning("odd", exc_info=True)
"""


def test_a_fault_in_any_library_is_a_line_with_its_class_alone() -> None:
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)

    lines = [json.loads(line) for line in done.stderr.splitlines()]
    told = [(line["event"], line.get("error")) for line in lines]
    assert told == [
        ("ready", None),
        ("asyncio", "ValueError"),
        ("uvicorn.error", "KeyError"),
        ("some.library", "KeyError"),
    ]
    assert "secret" not in done.stderr
