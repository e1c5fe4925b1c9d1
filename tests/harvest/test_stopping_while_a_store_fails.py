"""A store that fails keeps nobody who wants to stop: cancel and Ctrl-C end a run within seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from streamtap.errors import HarvestFailed, TransferFailed
from streamtap.harvest.asked import HarvestAsk
from streamtap.harvest.background import Background
from streamtap.harvest.plan import read_prompts
from streamtap.harvest.run import run_harvest
from streamtap.harvested.store_place import StorePlace
from streamtap.testing.fake_engine import FakeEngine

PROMPTS = [f"{chr(33 + i)} and so on" for i in range(40)]
#: Far less than the store is given, and more than a slow machine takes to stop.
SOON_SECONDS = 20.0


class _Failing(BaseHTTPRequestHandler):
    """Takes what says which run it is, and no rows."""

    def do_GET(self) -> None:
        if "list-type" in self.path:
            self._answer(200, b"<?xml version='1.0'?><ListBucketResult></ListBucketResult>")
        else:
            self._answer(404)

    def do_HEAD(self) -> None:
        self._answer(404)

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.path.endswith("/run.json"):
            self._answer(200)
        else:
            self.server.refused.set()  # type: ignore[attr-defined]
            self._answer(500)

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.send_header("etag", '"1"')
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Any:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Failing)
    server.refused = threading.Event()  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_address[1]}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "eu-central-1",
    }.items():
        monkeypatch.setenv(name, value)
    yield server
    server.shutdown()
    server.server_close()


def _run(spool: Path, should_stop: Callable[[], bool]) -> None:
    engine = FakeEngine()
    run_harvest(
        engine,
        read_prompts(PROMPTS, engine.tokenizer),
        StorePlace("s3://bucket/run", retry_seconds=600),
        HarvestAsk(layers=[1], shard_size=4),
        spool=spool,
        should_stop=should_stop,
    )


def test_a_cancelled_run_ends_soon_though_its_store_fails(failing: Any, tmp_path: Path) -> None:
    begun = time.monotonic()

    with pytest.raises(HarvestFailed, match="the harvest was stopped"):
        _run(tmp_path, failing.refused.is_set)

    assert time.monotonic() - begun < SOON_SECONDS


def test_a_run_that_fails_by_itself_does_not_wait_for_its_store(failing: Any, tmp_path: Path) -> None:
    begun = time.monotonic()

    def interrupted() -> bool:
        if failing.refused.is_set():
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        _run(tmp_path, interrupted)

    assert time.monotonic() - begun < SOON_SECONDS


def test_a_place_that_was_interrupted_waits_no_more(failing: Any) -> None:
    place = StorePlace("s3://bucket/run", retry_seconds=600)
    place.names()
    threading.Timer(0.5, place.interrupt).start()
    begun = time.monotonic()

    with pytest.raises(TransferFailed):
        place.put("shard_00000.json", b"{}")

    assert time.monotonic() - begun < SOON_SECONDS


def test_whoever_waits_for_room_is_asked_whether_to_go_on() -> None:
    free, given_up = threading.Event(), threading.Event()
    looks: list[float] = []

    def look() -> None:
        looks.append(time.monotonic())
        if len(looks) == 2:
            raise HarvestFailed("told to stop")

    def give_up() -> None:
        given_up.set()
        free.set()

    def wait_twice() -> None:
        with Background("b", most=1, look=look, give_up=give_up) as work:
            work.do(free.wait, 60)
            work.do(free.wait, 60)

    with pytest.raises(HarvestFailed, match="told to stop"):
        wait_twice()

    assert given_up.is_set()
    assert len(looks) == 2


def test_whoever_waits_for_the_end_is_asked_too() -> None:
    free = threading.Event()

    def look() -> None:
        raise HarvestFailed("told to stop")

    with pytest.raises(HarvestFailed, match="told to stop"), Background("b", look=look, give_up=free.set) as work:
        work.do(free.wait, 60)
