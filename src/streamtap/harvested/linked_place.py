"""A run's files behind signed links, which need no key and end: each is signed anew when it is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus

from streamtap.errors import AccessDenied, TransferFailed

#: Asks an address with these headers, and gives status and body; it raises ``TransferFailed`` where no answer comes.
HttpGet = Callable[[str, Mapping[str, str]], tuple[int, bytes]]
#: Signs the links of all files anew.
Refresh = Callable[[], Mapping[str, str]]

# Google tells of a link that ended by 400, and so does S3 where the credentials that signed it did.
_REFUSED = (HTTPStatus.BAD_REQUEST, HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)
_GONE = (HTTPStatus.NOT_FOUND, HTTPStatus.GONE)


class LinkedPlace:
    """The files of ``links``, by name; a ``streamtap.harvested.places.Place``.

    Args:
        links: Name to signed link.
        get: Asks an address.
        refresh: Called when a link is refused: once for each time that links end, however many threads read.
        url: What the run is called in messages; a link is a secret, and stands in none.
    """

    def __init__(self, links: Mapping[str, str], get: HttpGet, refresh: Refresh, *, url: str = "the run") -> None:
        self._links = dict(links)
        self._get, self._refresh, self._url = get, refresh, url
        self._signing = threading.Lock()

    @property
    def url(self) -> str:
        """What the run is called; no link."""
        return self._url

    def get(self, name: str) -> bytes:
        """See ``Place.get``."""
        status, data = self._answer(name, {})
        if status != HTTPStatus.OK:
            raise self._failed(name, status)
        return data

    def get_range(self, name: str, start: int, stop: int) -> bytes:
        """See ``Place.get_range``."""
        if stop <= start:
            return b""
        status, data = self._answer(name, {"Range": f"bytes={start}-{stop - 1}"})
        if status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return b""
        if status == HTTPStatus.OK:
            # A server that knows no ranges sends all of it.
            return data[start:stop]
        if status != HTTPStatus.PARTIAL_CONTENT or len(data) > stop - start:
            raise self._failed(name, status)
        return data

    def _answer(self, name: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
        link = self._link(name)
        status, data = self._get(link, headers)
        if status in _REFUSED:
            status, data = self._get(self._signed_anew(name, link), headers)
        if status in _REFUSED:
            raise AccessDenied(
                f"the server refuses the link to {name} of {self.url} (status {status}), also one just signed; ask for "
                "the job again, and see whether its files are still kept."
            )
        if status in _GONE:
            raise self._missing(name)
        return status, data

    def _signed_anew(self, name: str, refused: str) -> str:
        with self._signing:
            # Another thread may have done it while this one waited.
            if self._links.get(name) == refused:
                self._links = dict(self._refresh())
        return self._link(name)

    def _link(self, name: str) -> str:
        try:
            return self._links[name]
        except KeyError:
            raise self._missing(name) from None

    def _missing(self, name: str) -> FileNotFoundError:
        return FileNotFoundError(f"{self.url} has no file {name}, or none any more.")

    def _failed(self, name: str, status: int) -> TransferFailed:
        return TransferFailed(f"reading {name} of {self.url} failed: the server answers {status}; try again later.")
