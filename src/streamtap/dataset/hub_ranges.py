"""Bytes of files on the Hub, no more than are asked for, and one request for each range."""

from __future__ import annotations

import re
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit

from streamtap.dataset.hub_calls import HubCalls
from streamtap.errors import TransferFailed

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

#: How storages say that a signed address is no longer good.
_EXPIRED = {400, 401, 403, 404, 410}
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")
_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Location:
    """Where the bytes of a file are. The token goes to the Hub itself only, so not where ``is_foreign``."""

    url: str
    size_bytes: int
    is_foreign: bool


class HubRanges:
    """Reads files of one commit. Each method may be called from several threads."""

    def __init__(self, calls: HubCalls, commit: str) -> None:
        self._calls = calls
        self._commit = commit
        self._guard = Lock()
        self._locks: dict[str, Lock] = defaultdict(Lock)
        self._locations: dict[str, Location] = {}

    def size_bytes(self, path: str) -> int:
        """Size of a file; asks the server once."""
        return self._calls.call(f"looking at {self._named(path)}", lambda: self._location(path).size_bytes)

    def read(self, path: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop), which lie within the file."""
        return self._calls.call(f"reading {self._named(path)}", lambda: self._read(path, start, stop))

    def _named(self, path: str) -> str:
        return f"{path} of {self._calls.repo_id}"

    def _read(self, path: str, start: int, stop: int) -> bytes:
        from huggingface_hub.errors import HfHubHTTPError

        location = self._location(path)
        try:
            return self._get(location, start, stop)
        except HfHubHTTPError as error:
            if not location.is_foreign or _status(error) not in _EXPIRED:
                raise
        self._forget(path, location)
        return self._get(self._location(path), start, stop)

    def _get(self, location: Location, start: int, stop: int) -> bytes:
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        headers = build_hf_headers(
            token=False if location.is_foreign else self._calls.token,
            headers={"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"},
        )
        # With a token on board, nobody but us decides where to go.
        with get_session().stream(
            "GET",
            location.url,
            headers=headers,
            timeout=self._calls.timeout_seconds,
            follow_redirects=location.is_foreign,
        ) as response:
            hf_raise_for_status(response)
            return _body(response, start, stop)

    def _location(self, path: str) -> Location:
        with self._guard:
            lock = self._locks[path]
        with lock:
            if path not in self._locations:
                self._locations[path] = self._ask(path)
            return self._locations[path]

    def _forget(self, path: str, location: Location) -> None:
        with self._guard:
            lock = self._locks[path]
        with lock:
            # Another thread may have asked anew already.
            if self._locations.get(path) is location:
                del self._locations[path]

    def _ask(self, path: str) -> Location:
        from huggingface_hub import get_hf_file_metadata, hf_hub_url

        calls = self._calls
        url = hf_hub_url(calls.repo_id, path, repo_type="dataset", revision=self._commit, endpoint=calls.endpoint)
        found = get_hf_file_metadata(url, token=calls.token, timeout=calls.timeout_seconds, endpoint=calls.endpoint)
        if found.size is None:
            raise TransferFailed(f"{calls.endpoint} does not say how large {self._named(path)} is; is it a Hub?")
        address = urljoin(url, found.location)
        return Location(address, found.size, _origin(address) != _origin(calls.endpoint))


def _body(response: Any, start: int, stop: int) -> bytes:
    """Bytes [start, stop) of a file, from an answer that may hold more than was asked for."""
    first, end = _extent(response)
    if first > start or end < stop:
        raise ConnectionError(f"the server sent bytes {first} to {end} where {start} to {stop} were asked for")
    wanted = bytearray()
    skip = start - first
    chunks = response.iter_bytes()
    for chunk in chunks:
        wanted += chunk[skip:]
        skip = max(0, skip - len(chunk))
        if len(wanted) >= stop - start and end > stop:
            # A server that ignores ranges would go on to the end of the file.
            break
    if len(wanted) < stop - start:
        raise ConnectionError("the connection ended before all bytes had come")
    return bytes(wanted[: stop - start])


def _extent(response: Any) -> tuple[int, int]:
    """First byte of the file that the answer holds, and the one after its last."""
    partial = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
    if response.status_code == 206 and partial:
        return int(partial[1]), int(partial[2]) + 1
    if response.status_code == 200:
        with suppress(KeyError, ValueError):
            return 0, int(response.headers["content-length"])
        return 0, 1 << 62
    raise ConnectionError(f"the server answered HTTP {response.status_code} to a request for a range")


def _status(error: HfHubHTTPError) -> int:
    return int(error.response.status_code)


def _origin(url: str) -> tuple[str, str, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or _DEFAULT_PORTS.get(parts.scheme)
