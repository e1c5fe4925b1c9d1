"""Links end in the middle of a transfer: they are signed anew, and no more than that."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest

from streamtap.errors import AccessDenied, HarvestNotFound, TransferFailed
from streamtap.harvested.linked_place import LinkedPlace
from streamtap.harvested.reader import HarvestedRun

Make = Callable[..., Any]
SECRET = "signature-of-the-tests"


@dataclass
class LinkServer:
    """Files behind links that are good for ``uses`` requests each time they are signed."""

    files: Mapping[str, bytes]
    uses: int = 1 << 30
    status: int = 403
    knows_ranges: bool = True
    signed: int = 0
    requests: int = 0
    left: int = 0
    forced: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock, self._numbers = threading.Lock(), count(1)

    def sign(self) -> dict[str, str]:
        with self._lock:
            self.signed, self.left = next(self._numbers), self.uses
            return {name: f"https://store/{name}?{SECRET}={self.signed}" for name in self.files}

    def get(self, link: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
        path, _, number = link.removeprefix("https://store/").partition(f"?{SECRET}=")
        with self._lock:
            self.requests += 1
            if self.forced:
                return self.forced.pop(0), b"<Error>what the server says</Error>"
            if int(number) != self.signed or not self.left:
                return self.status, b"<Error>expired</Error>"
            self.left -= 1
        data = self.files.get(path)
        return (404, b"") if data is None else self._ranged(data, headers.get("Range"))

    def _ranged(self, data: bytes, asked: str | None) -> tuple[int, bytes]:
        if asked is None or not self.knows_ranges:
            return 200, data
        start, stop = map(int, asked.removeprefix("bytes=").split("-"))
        return (416, b"") if start >= len(data) else (206, data[start : stop + 1])


def place_of(server: LinkServer) -> LinkedPlace:
    return LinkedPlace(server.sign(), server.get, server.sign, url="harvest job-1")


@pytest.mark.parametrize("knows_ranges", [True, False])
def test_files_and_ranges(knows_ranges: bool) -> None:
    place = place_of(LinkServer({"x": b"0123456789", "empty": b""}, knows_ranges=knows_ranges))

    assert place.get("x") == b"0123456789"
    assert place.get_range("x", 2, 5) == b"234"
    assert place.get_range("x", 8, 99) == b"89"
    assert place.get_range("x", 10, 12) == place.get_range("x", 5, 5) == place.get_range("empty", 0, 5) == b""
    assert place.url == "harvest job-1"


@pytest.mark.parametrize("status", [400, 401, 403])
def test_links_that_end_in_the_middle_are_signed_once(status: int) -> None:
    content = bytes(range(256)) * 40
    server = LinkServer({"x": content}, uses=2, status=status)
    place = place_of(server)
    parts = [place.get_range("x", start, start + 2560) for start in range(0, len(content), 2560)]

    assert hashlib.sha256(b"".join(parts)).digest() == hashlib.sha256(content).digest()
    # Four parts of two uses a link: once at the start, and once in the middle.
    assert server.signed == 2
    assert server.requests == 5


@pytest.mark.parametrize("status", [400, 401, 403])
def test_a_link_that_is_refused_just_after_it_was_signed_is_final(status: int) -> None:
    server = LinkServer({"x": b"abc"}, uses=0, status=status)
    place = place_of(server)

    for ask in (lambda: place.get("x"), lambda: place.get_range("x", 0, 1)):
        before = server.requests, server.signed
        with pytest.raises(AccessDenied, match=f"refuses the link to x of harvest job-1 .status {status}.") as caught:
            ask()  # type: ignore[no-untyped-call]
        assert (server.requests, server.signed) == (before[0] + 2, before[1] + 1)
        assert SECRET not in str(caught.value)
        assert "what the server says" not in str(caught.value)


def test_many_threads_that_are_refused_together_sign_once() -> None:
    server = LinkServer({name: name.encode() * 9 for name in "abcdefgh"})
    links, together = server.sign(), threading.Barrier(8)
    server.sign()

    def get(link: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
        answer = server.get(link, headers)
        if answer[0] == 403:
            together.wait(30)
        return answer

    place = LinkedPlace(links, get, server.sign)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(place.get, "abcdefgh")) == [name.encode() * 9 for name in "abcdefgh"]
    assert server.signed == 3
    assert server.requests == 16


@pytest.mark.parametrize("status", [404, 410])
def test_a_file_that_is_gone(status: int) -> None:
    server = LinkServer({"x": b"abc"})
    place = place_of(server)
    server.forced = [status] * 2

    for ask in (lambda: place.get("x"), lambda: place.get_range("x", 0, 1), lambda: place.get("y")):
        with pytest.raises(FileNotFoundError, match="harvest job-1 has no file [xy], or none any more"):
            ask()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("status", [204, 302, 429, 500, 503])
def test_an_answer_that_is_none(status: int) -> None:
    server = LinkServer({"x": b"abc"})
    place = place_of(server)
    server.forced = [status] * 2

    for ask in (lambda: place.get("x"), lambda: place.get_range("x", 0, 1)):
        with pytest.raises(TransferFailed, match=f"reading x of harvest job-1 failed: the server answers {status}"):
            ask()  # type: ignore[no-untyped-call]


def test_more_than_was_asked_for_is_no_answer() -> None:
    server = LinkServer({"x": b"abc"})
    place = LinkedPlace(server.sign(), lambda _link, _headers: (206, b"too much"), server.sign)

    with pytest.raises(TransferFailed, match="reading x of the run failed"):
        place.get_range("x", 0, 2)


def test_what_signing_says_is_passed_on() -> None:
    def refused() -> Mapping[str, str]:
        raise HarvestNotFound("no such job.")

    server = LinkServer({"x": b"abc"}, uses=0)
    with pytest.raises(HarvestNotFound):
        LinkedPlace(server.sign(), server.get, refused).get("x")


@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_run_is_read_through_links_that_end(make_run: Make, compression: str) -> None:
    made = make_run(compression=compression)
    server = LinkServer({file.name: file.read_bytes() for file in made.folder.iterdir()}, uses=2)
    run = HarvestedRun.open(place_of(server))
    found = run.activations()

    for i in range(11):
        for layer in (0, 2, 3):
            assert found.prompt(i)[layer].tobytes() == made.rows(i, layer).tobytes()
    run.verify()
    assert server.signed > 2
