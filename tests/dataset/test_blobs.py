from __future__ import annotations

import hashlib
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx2
import pytest

from streamtap.blobs import Blob, BlobStore
from streamtap.errors import AccessDenied, InvalidInput, MissingExtra, StreamtapError, TransferFailed

BIG = random.Random(0).randbytes(20_000_000)
SECRET = "tell-nobody"


@pytest.fixture
def store(s3_url: str) -> BlobStore:
    return BlobStore(s3_url, retry_seconds=5)


def _file(folder: Path, content: bytes) -> tuple[Path, str]:
    file = folder / "local"
    file.write_bytes(content)
    return file, hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("content", [b"", b"abc", BIG], ids=["empty", "small", "multipart"])
def test_a_file_comes_back_as_it_was_put(store: BlobStore, tmp_path: Path, content: bytes) -> None:
    file, digest = _file(tmp_path, content)
    sent: list[int] = []
    came: list[int] = []

    store.put_file("tensors/x.bin", file, digest=digest, advance=sent.append)
    store.download(store.head("tensors/x.bin"), tmp_path / "new" / "y.bin", advance=came.append)

    assert (tmp_path / "new" / "y.bin").read_bytes() == content
    assert sum(sent) == sum(came) == len(content)
    assert store.digest("tensors/x.bin") == digest
    assert [each.name for each in (tmp_path / "new").iterdir()] == ["y.bin"]


def test_ranges(store: BlobStore) -> None:
    store.put("x", b"0123456789")

    assert store.get_range("x", 2, 5) == b"234"
    assert store.get_range("x", 8, 50) == b"89"
    assert store.get_range("x", 10, 12) == store.get_range("x", 5, 5) == b""


def test_a_whole_object(store: BlobStore) -> None:
    for content in (b"", b"abc"):
        store.put("x", content)
        assert store.get("x") == content
    with pytest.raises(FileNotFoundError, match="my-dataset/y"):
        store.get("y")


def test_a_signed_link_needs_no_key_and_ends(store: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    links = {seconds: store.sign("a b/ü+x", seconds) for seconds in (1, 60)}
    assert httpx2.get(links[60]).status_code == 404
    store.put("a b/ü+x", b"0123456789")
    link = store.sign("a b/ü+x", 60)
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")

    assert httpx2.get(link).content == b"0123456789"
    part = httpx2.get(link, headers={"Range": "bytes=2-4"})
    assert (part.status_code, part.content, part.headers["Content-Range"]) == (206, b"234", "bytes 2-4/10")
    assert httpx2.get(link, headers={"Range": "bytes=-3"}).content == b"789"
    assert httpx2.get(link, headers={"If-None-Match": part.headers["ETag"]}).status_code == 304
    # It is for this object, and for reading it.
    assert httpx2.get(link.replace("%2Bx", "%2By")).status_code in (403, 404)
    assert httpx2.put(link, content=b"other").status_code == 403
    time.sleep(1.5)
    assert httpx2.get(links[1]).status_code == 403


@pytest.mark.parametrize("seconds", [0, -5, 0.5, 7 * 24 * 3600 + 1, float("nan")])
def test_a_link_that_no_store_would_sign(store: BlobStore, seconds: float) -> None:
    with pytest.raises(InvalidInput, match="from one second to 7 days"):
        store.sign("x", seconds)
    assert store.sign("x", 7 * 24 * 3600)


def test_an_empty_object(store: BlobStore) -> None:
    store.put("x", b"")

    assert store.head("x").size_bytes == 0
    assert store.get_range("x", 0, 5) == b""


def test_listing(store: BlobStore) -> None:
    assert store.entries() == ([], [])
    for path in ("README.md", "index/a", "tensors/deep/b", "tensors/c", "tensors-other/d"):
        store.put(path, path.encode())

    files, folders = store.entries()

    assert [(each.path, each.size_bytes) for each in files] == [("README.md", 9)]
    assert folders == ["index", "tensors", "tensors-other"]
    assert sorted(each.path for each in store.walk("tensors")) == ["tensors/c", "tensors/deep/b"]
    assert list(store.walk("nothing")) == []


def test_a_listing_of_many_objects_is_whole(store: BlobStore) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: store.put(f"tensors/{number:04}", b""), range(1010)))

    assert [each.path for each in store.walk("tensors")] == [f"tensors/{number:04}" for number in range(1010)]


def test_what_is_removed_is_gone(store: BlobStore) -> None:
    store.put("x", b"abc")
    store.delete("x")
    store.delete("x")

    assert store.digest("x") is None
    for ask in (lambda: store.head("x"), lambda: store.get_range("x", 0, 1)):
        with pytest.raises(FileNotFoundError, match="my-dataset/x"):
            ask()  # type: ignore[no-untyped-call]


def test_an_etag_holds_a_reader_to_one_version(store: BlobStore, tmp_path: Path) -> None:
    store.put("x", b"old")
    old = store.head("x")
    store.put("x", b"new")

    assert store.head("x").etag != old.etag
    assert store.digest("x") is None
    for ask in (
        lambda: store.get_range("x", 0, 1, etag=old.etag),
        lambda: store.download(old, tmp_path / "x"),
    ):
        with pytest.raises(FileNotFoundError, match="replaced"):
            ask()
    assert not (tmp_path / "x").exists()
    store.download(store.head("x"), tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == b"new"


def test_downloads_of_one_file_at_the_same_time(store: BlobStore, tmp_path: Path) -> None:
    file, digest = _file(tmp_path, BIG)
    store.put_file("x", file, digest=digest)
    blob = store.head("x")
    came: list[int] = []

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: store.download(blob, tmp_path / "new" / "x", advance=came.append), range(4)))

    assert (tmp_path / "new" / "x").read_bytes() == BIG
    assert [each.name for each in (tmp_path / "new").iterdir()] == ["x"]
    # A thread that came late may have begun anew; those that waited did not.
    assert sum(came) % len(BIG) == 0


def test_wrong_keys_are_refused_and_not_repeated(store: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)

    for ask in (lambda: store.head("x"), store.entries, lambda: store.put("x", b"")):
        with pytest.raises(AccessDenied, match="AWS_ACCESS_KEY_ID") as caught:
            ask()
        assert SECRET not in str(caught.value)
        assert "key-of-the-tests" not in str(caught.value)
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__


def test_a_bucket_that_is_not_there(store: BlobStore) -> None:
    with pytest.raises(FileNotFoundError, match="s3://no-such-bucket"):
        BlobStore("s3://no-such-bucket/x").entries()


@pytest.mark.parametrize(
    "url",
    [
        f"s3://KEY:{SECRET}@bucket/x",
        f"s3://{SECRET}@bucket",
        f"s3://bucket/x?X-Amz-Signature={SECRET}",
        f"az://container/x#{SECRET}",
        f"http://user:{SECRET}@127.0.0.1/x",
        f"s3://bucket/../{SECRET}",
        f"s3://bucket//{SECRET}",
        f"s3:///{SECRET}",
        f"gs:/{SECRET}",
        "s3://",
        "",
    ],
)
def test_an_address_that_does_not_fit_is_not_repeated(url: str) -> None:
    with pytest.raises(InvalidInput, match="s3://bucket/folder.*without credentials") as caught:
        BlobStore(url)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("url", ["s3://bucket", "s3://bucket/a b/c%20d@1", "gs://my-bucket/x", "az://container/a/b"])
def test_addresses_that_fit(url: str) -> None:
    assert BlobStore(url).url == BlobStore(url + "/").url == url


def test_an_environment_that_opens_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_CONNECTION_STRING"):
        monkeypatch.delenv(name, raising=False)

    with pytest.raises(
        InvalidInput, match="az://container/x cannot be opened with what the environment says: .*ccount"
    ):
        BlobStore("az://container/x").head("y")


def test_without_obstore_the_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("obstore", "obstore.exceptions", "obstore.store"):
        monkeypatch.setitem(sys.modules, name, None)

    with pytest.raises(MissingExtra, match=r"pip install 'streamtap\[stores\]'"):
        BlobStore("gs://bucket/x").head("y")


# What follows needs a server that fails as it is told.


class _Scripted(BaseHTTPRequestHandler):
    """Answers each request with the next step of the server's script, then with the content."""

    content = b"0123456789"

    def do_GET(self) -> None:
        script: list[Callable[[_Scripted], None]] = self.server.script  # type: ignore[attr-defined]
        (script.pop(0) if script else _Scripted.whole)(self)

    def answer(self, status: int, body: bytes, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.send_header("Content-Range", f"bytes 0-9/{len(self.content)}")
        self.send_header("Last-Modified", "Tue, 01 Dec 2026 00:00:00 GMT")
        self.send_header("ETag", '"e"')
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = True

    def whole(self) -> None:
        self.answer(206, self.content)

    def cut(self) -> None:
        self.answer(206, self.content[:4], len(self.content))

    def busy(self) -> None:
        self.answer(503, b"<Error><Code>SlowDown</Code></Error>")

    def limited(self) -> None:
        self.answer(429, b"")

    def refused(self) -> None:
        self.answer(403, f"<Error><Code>Nope</Code><AWSAccessKeyId>{SECRET}</AWSAccessKeyId></Error>".encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Tell nobody."""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Callable[[_Scripted], None]]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Scripted)
    server.script = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "anything")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    yield server.script  # type: ignore[attr-defined]
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("step", [_Scripted.busy, _Scripted.limited, _Scripted.cut])
def test_a_server_that_fails_for_a_while_is_waited_for(
    script: list[Callable[[_Scripted], None]], step: Callable[[_Scripted], None]
) -> None:
    script += [step, step]

    assert BlobStore("s3://bucket/x").get_range("y", 0, 10) == _Scripted.content
    assert script == []


def test_a_server_that_fails_for_too_long(script: list[Callable[[_Scripted], None]]) -> None:
    script += [_Scripted.busy] * 100

    with pytest.raises(TransferFailed, match=r"reading s3://bucket/x/y failed: 503 SlowDown") as caught:
        BlobStore("s3://bucket/x", retry_seconds=0.3).get_range("y", 0, 10)
    assert caught.value.retryable


def test_the_answer_of_a_server_that_refuses_is_not_repeated(script: list[Callable[[_Scripted], None]]) -> None:
    script += [_Scripted.refused] * 100

    with pytest.raises(AccessDenied, match="403 Nope") as caught:
        BlobStore("s3://bucket/x").get_range("y", 0, 10)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("AWS_ENDPOINT_URL", f"http://user:{SECRET}@127.0.0.1:1", "error sending request"),
        ("AWS_ALLOW_HTTP", "false", "AWS_ALLOW_HTTP=true"),
    ],
)
def test_a_server_that_cannot_be_reached(
    script: list[Callable[[_Scripted], None]], monkeypatch: pytest.MonkeyPatch, variable: str, value: str, says: str
) -> None:
    monkeypatch.setenv(variable, value)

    with pytest.raises(StreamtapError, match=says) as caught:
        BlobStore("s3://bucket/x", retry_seconds=0.1).get_range("y", 0, 10)
    assert SECRET not in str(caught.value)


def test_a_download_that_fails_leaves_nothing_and_can_be_repeated(
    script: list[Callable[[_Scripted], None]], tmp_path: Path
) -> None:
    script += [_Scripted.refused]
    store, blob = BlobStore("s3://bucket/x"), Blob("y", 10, '"e"')

    with pytest.raises(AccessDenied):
        store.download(blob, tmp_path / "y")
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) == 0

    store.download(blob, tmp_path / "y")
    assert [file.name for file in tmp_path.iterdir()] == ["y"]
    assert (tmp_path / "y").read_bytes() == _Scripted.content
