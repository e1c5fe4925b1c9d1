"""Files behind signed links: they are asked for without our key, which is no business of who serves them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from urllib.parse import urlsplit

import httpx2

import streamtap
from streamtap.errors import TransferFailed

#: A store that fails for the moment is asked again, so often and with twice the wait each time.
_TRIES, _FIRST_WAIT_SECONDS = 6, 0.5
_BUSY = (
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.INTERNAL_SERVER_ERROR,
    HTTPStatus.BAD_GATEWAY,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
)
_CONNECT_SECONDS = 10.0


class _Unlogged(logging.Filter):
    """Keeps links out of the library's log, which has a line with the whole address for each request."""

    def __init__(self) -> None:
        super().__init__()
        self.here = threading.local()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record may be written: not while this thread follows a link."""
        return not getattr(self.here, "following", False)

    @contextmanager
    def following(self) -> Iterator[None]:
        """What this thread does in the ``with`` is not logged."""
        self.here.following = True
        try:
            yield
        finally:
            self.here.following = False


_UNLOGGED = _Unlogged()


class LinkReader:
    """Gets what links lead to; may be used by several threads. Errors name the host, for a link is a secret.

    Args:
        timeout_seconds: How long a server may be silent.
        transport: In place of the network, for tests.
        sleep: How to wait.
    """

    def __init__(
        self,
        timeout_seconds: float,
        transport: httpx2.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._http = httpx2.Client(
            transport=transport,
            timeout=httpx2.Timeout(timeout_seconds, connect=min(_CONNECT_SECONDS, timeout_seconds), pool=None),
            headers={"User-Agent": f"streamtap/{streamtap.__version__}", "Accept-Encoding": "identity"},
            follow_redirects=True,
        )
        self._sleep = sleep
        logging.getLogger("httpx2").addFilter(_UNLOGGED)

    def close(self) -> None:
        """Let go of the connections."""
        self._http.close()

    def get(self, link: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """Status and body.

        Raises:
            TransferFailed: no answer, for longer than we try.
        """
        wait, failed = _FIRST_WAIT_SECONDS, ""
        for attempt in range(_TRIES):
            if attempt:
                self._sleep(wait)
                wait *= 2
            try:
                with _UNLOGGED.following():
                    response = self._http.get(link, headers=dict(headers))
            except (httpx2.RequestError, httpx2.InvalidURL) as error:
                # Its own text may hold the link.
                failed = type(error).__name__
                continue
            if response.status_code not in _BUSY:
                return response.status_code, response.content
            failed = f"status {response.status_code}"
        host = urlsplit(link).hostname
        raise TransferFailed(f"{host} does not give a file of the harvest ({failed}); try again later.")
