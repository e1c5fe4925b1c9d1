"""A run's files in an object store: ``s3://bucket/folder`` and its kin."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from streamtap.blobs import RETRY_SECONDS, BlobStore
from streamtap.errors import InvalidInput, TransferFailed
from streamtap.harvested.places import checked_name

T = TypeVar("T")
#: A server that has not answered yet may be one that is not there, and is not waited for as long.
_FIRST_SECONDS = 20.0
_PAUSE_SECONDS = (0.5, 10.0)
#: Of obstore's own within one try, which nothing can interrupt: some three seconds.
_RETRIES = 5


class StorePlace:
    """The objects under one address; a ``streamtap.harvested.places.WritablePlace``.

    A store that fails is asked again for ``retry_seconds``; what is sent is sent anew, from its file.
    """

    def __init__(self, url: str, *, retry_seconds: float = RETRY_SECONDS) -> None:
        """Nothing is asked of the server yet.

        Raises:
            InvalidInput: not an address of an object store, or one that holds credentials.
        """
        self.store = BlobStore(url, retry_seconds=retry_seconds, retries=_RETRIES)
        self._interrupted = threading.Event()
        self._retry_seconds = retry_seconds
        self._has_answered = False

    @property
    def url(self) -> str:
        """The address, which holds no credentials."""
        return self.store.url

    def get(self, name: str) -> bytes:
        """See ``Place.get``."""
        return self._asked(lambda: self.store.get(checked_name(name)))

    def get_range(self, name: str, start: int, stop: int) -> bytes:
        """See ``Place.get_range``."""
        return self._asked(lambda: self.store.get_range(checked_name(name), start, stop))

    def size(self, name: str) -> int | None:
        """See ``WritablePlace.size``."""
        try:
            return self._asked(lambda: self.store.head(checked_name(name))).size_bytes
        except FileNotFoundError:
            return None

    def names(self) -> set[str]:
        """See ``WritablePlace.names``."""
        try:
            return {blob.path for blob in self._asked(self.store.entries)[0]}
        except FileNotFoundError:
            raise self._no_bucket() from None

    def check(self) -> None:
        """See ``WritablePlace.check``; that the bucket is there and its listing can be read."""
        self.names()

    def put(self, name: str, data: bytes) -> None:
        """See ``WritablePlace.put``."""
        self._sent(lambda: self.store.put(checked_name(name), data))

    def put_file(self, name: str, file: Path, *, sha256: str) -> None:
        """See ``WritablePlace.put_file``; the object carries its hash."""
        self._sent(lambda: self.store.put_file(checked_name(name), file, digest=sha256))

    def delete(self, name: str) -> None:
        """See ``WritablePlace.delete``."""
        self._asked(lambda: self.store.delete(checked_name(name)))

    def sign(self, name: str, expires_seconds: float) -> str:
        """A link to a file that needs no key; see ``BlobStore.sign``."""
        return self.store.sign(checked_name(name), expires_seconds)

    def interrupt(self) -> None:
        """See ``Patient``."""
        self._interrupted.set()

    def _sent(self, send: Callable[[], None]) -> None:
        try:
            self._asked(send)
        except FileNotFoundError:
            raise self._no_bucket() from None

    def _asked(self, ask: Callable[[], T]) -> T:
        """What ``ask`` returns, asked again while the store fails; obstore's own tries end after a few seconds."""
        begun, pause = time.monotonic(), _PAUSE_SECONDS[0]
        while True:
            try:
                found = ask()
            except FileNotFoundError:
                self._has_answered = True
                raise
            except TransferFailed as error:
                left = begun + self._patience() - time.monotonic() - pause
                if not error.retryable or left < 0 or self._interrupted.wait(pause):
                    raise
            else:
                self._has_answered = True
                return found
            pause = min(2 * pause, _PAUSE_SECONDS[1])

    def _patience(self) -> float:
        return self._retry_seconds if self._has_answered else min(self._retry_seconds, _FIRST_SECONDS)

    def _no_bucket(self) -> InvalidInput:
        bucket = "/".join(self.url.split("/")[:3])
        return InvalidInput(f"{bucket} is not there; make it first, or name another.")
