"""A run in an object store: a real one, and one that fails as it is told."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import pytest

from streamtap.errors import AccessDenied, InvalidInput, TransferFailed
from streamtap.harvested import store_place
from streamtap.harvested.linked_place import LinkedPlace
from streamtap.harvested.opening import open_place
from streamtap.harvested.reader import HarvestedRun
from streamtap.harvested.store_place import StorePlace

Make = Callable[..., Any]


@pytest.fixture
def place(s3_url: str) -> StorePlace:
    return StorePlace(s3_url, retry_seconds=5)


def _fill(place: StorePlace, folder: Path) -> None:
    for file in folder.iterdir():
        place.put_file(file.name, file, sha256=hashlib.sha256(file.read_bytes()).hexdigest())


def test_what_is_put_is_there(place: StorePlace, tmp_path: Path) -> None:
    assert place.names() == set()
    assert place.size("run.json") is None
    place.put("run.json", b"older")
    place.put("run.json", b"0123456789")
    file = tmp_path / "shard"
    file.write_bytes(b"rows")
    place.put_file("shard_00000.safetensors", file, sha256=hashlib.sha256(b"rows").hexdigest())

    assert place.names() == {"run.json", "shard_00000.safetensors"}
    assert place.size("run.json") == 10
    assert place.get("run.json") == b"0123456789"
    assert place.get_range("run.json", 2, 5) == b"234"
    assert place.get_range("run.json", 8, 99) == b"89"
    assert place.get_range("run.json", 10, 12) == place.get_range("run.json", 3, 3) == b""
    assert place.store.digest("shard_00000.safetensors") == hashlib.sha256(b"rows").hexdigest()
    assert file.exists()
    place.delete("run.json")
    place.delete("run.json")
    assert place.size("run.json") is None
    for ask in (place.get, lambda name: place.get_range(name, 0, 1)):
        with pytest.raises(FileNotFoundError, match="run.json"):
            ask("run.json")


def test_files_below_are_no_files_of_the_run(place: StorePlace) -> None:
    place.put("run.json", b"")
    place.store.put(".spool/x", b"")
    place.store.put("other/run.json", b"")

    assert place.names() == {"run.json"}


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_run_is_read_from_a_store(make_run: Make, place: StorePlace, s3_url: str, compression: str) -> None:
    made = make_run(compression=compression)
    _fill(place, made.folder)
    run = HarvestedRun.open(s3_url)
    found = run.activations()

    for i in range(11):
        for layer in (0, 2, 3):
            assert found.prompt(i)[layer].tobytes() == made.rows(i, layer).tobytes()
            assert run.prompt(i, [layer])[layer].tobytes() == made.rows(i, layer).tobytes()
    run.verify()


def test_a_run_is_read_by_signed_links(make_run: Make, place: StorePlace) -> None:
    made = make_run()
    _fill(place, made.folder)
    names, signed, seconds = place.names(), [], [1.0, 600.0]

    def sign() -> dict[str, str]:
        signed.append(seconds.pop(0))
        return {name: place.sign(name, signed[-1]) for name in names}

    linked = LinkedPlace(sign(), lambda link, headers: _status_and_body(httpx2.get(link, headers=dict(headers))), sign)
    time.sleep(2.1)
    run = HarvestedRun.open(linked)

    assert run.prompt(5)[2].tobytes() == made.rows(5, 2).tobytes()
    run.verify()
    assert signed == [1.0, 600.0]


def _status_and_body(response: httpx2.Response) -> tuple[int, bytes]:
    return response.status_code, response.content


def test_a_bucket_that_is_not_there(s3_url: str) -> None:
    with pytest.raises(InvalidInput, match="s3://no-such-bucket is not there; make it first"):
        StorePlace("s3://no-such-bucket/run", retry_seconds=1).check()


def test_wrong_keys_are_not_waited_for(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    began = time.monotonic()

    with pytest.raises(AccessDenied):
        StorePlace(s3_url).put("x", b"")
    assert time.monotonic() - began < 5


def test_names_that_lead_elsewhere_are_refused(place: StorePlace, tmp_path: Path) -> None:
    asks: list[Any] = [place.get, place.size, place.delete, lambda name: place.put(name, b"")]
    asks += [lambda name: place.sign(name, 5), lambda name: place.put_file(name, tmp_path, sha256="")]
    for ask in asks:
        with pytest.raises(InvalidInput, match="a file of a run is named like"):
            ask("../x")


@pytest.mark.parametrize("name", ["run", "./run", "/tmp/run", "a:b"])
def test_folders_are_opened_by_name(name: str) -> None:
    assert open_place(name).url == str(Path(name).absolute())
    assert open_place(Path(name)).url == str(Path(name).absolute())


def test_stores_are_opened_by_address() -> None:
    for url in ("s3://bucket/run", "gs://bucket/run", "az://container/run"):
        assert open_place(url + "/").url == url


@pytest.mark.parametrize("name", ["", " ", "ftp://user:secret@host/x", "https://host/secret", "s3://KEY:secret@b/x"])
def test_what_is_no_place_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match="s3://bucket/folder") as caught:
        open_place(name)
    assert "secret" not in str(caught.value)


# What follows needs a store that fails as it is told.


class _Failing(BaseHTTPRequestHandler):
    """Takes and gives objects, but for the time that the test lets it fail."""

    def _answer(self) -> None:
        server: Any = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if time.monotonic() < server.fails_until:
            server.refused += 1
            return self._send(500, b"")
        path = self.path.partition("?")[0]
        if self.command == "PUT" and server.has_bucket:
            server.objects[path] = body
            return self._send(200, b"")
        return self._send(404, b"") if path not in server.objects else self._send(200, server.objects[path])

    do_GET = do_PUT = do_HEAD = _answer  # noqa: N815  # the library's names

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", '"e"')
        self.send_header("Last-Modified", "Tue, 01 Dec 2026 00:00:00 GMT")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Tell nobody."""


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Failing)
    server.objects, server.fails_until, server.refused, server.has_bucket = {}, 0.0, 0, True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "anything")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library's own tries end at once, so that it is ours that are seen."""
    monkeypatch.setattr("streamtap.blobs._RETRIES", 0)
    monkeypatch.setattr(store_place, "_PAUSE_SECONDS", (0.05, 0.1))


@pytest.mark.usefixtures("impatient")
def test_a_store_that_fails_for_a_while_is_asked_again(
    failing: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So long would a store be waited for that has not answered before.
    monkeypatch.setattr(store_place, "_FIRST_SECONDS", 0.0)
    place = StorePlace("s3://bucket/run", retry_seconds=20)
    place.put("run.json", b"begun")
    file = tmp_path / "x"
    file.write_bytes(b"rows")
    for number, ask in enumerate((lambda: place.put_file("x", file, sha256="00"), lambda: place.get("run.json"))):
        failing.refused, failing.fails_until = 0, time.monotonic() + 1
        ask()  # type: ignore[no-untyped-call]
        assert failing.refused > 3, number

    assert failing.objects["/bucket/run/x"] == b"rows"


@pytest.mark.usefixtures("impatient")
def test_a_store_that_fails_for_too_long(failing: Any, tmp_path: Path) -> None:
    place = StorePlace("s3://bucket/run", retry_seconds=1)
    place.put("run.json", b"begun")
    file = tmp_path / "x"
    file.write_bytes(b"rows")
    failing.fails_until = began = time.monotonic() + 3600

    with pytest.raises(TransferFailed, match="writing s3://bucket/run/x failed: status 500") as caught:
        place.put_file("x", file, sha256="00")
    assert 0.5 < time.monotonic() - (began - 3600) < 10
    assert caught.value.retryable
    assert file.read_bytes() == b"rows"
    failing.fails_until = 0.0
    place.put_file("x", file, sha256="00")
    assert failing.objects["/bucket/run/x"] == b"rows"


@pytest.mark.usefixtures("impatient")
def test_a_store_that_never_answered_is_not_waited_for_as_long(failing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_place, "_FIRST_SECONDS", 0.3)
    failing.fails_until = began = time.monotonic() + 3600

    with pytest.raises(TransferFailed, match="reading s3://bucket/run/run.json failed"):
        StorePlace("s3://bucket/run", retry_seconds=30).get("run.json")
    assert time.monotonic() - (began - 3600) < 15


def test_a_bucket_that_is_not_there_takes_nothing(failing: Any, tmp_path: Path) -> None:
    failing.has_bucket = False
    place, file = StorePlace("s3://bucket/run"), tmp_path / "x"
    file.write_bytes(b"x")

    asks: list[Any] = [lambda: place.put("x", b""), lambda: place.put_file("x", file, sha256="")]
    for ask in asks:
        with pytest.raises(InvalidInput, match="s3://bucket is not there; make it first, or name another"):
            ask()
