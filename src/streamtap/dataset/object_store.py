"""Datasets in an object store: ``s3://bucket/folder`` and its kin."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from streamtap.blobs import Blob, BlobStore
from streamtap.dataset.inside import inside
from streamtap.dataset.names import CARD, INDEX, is_ours
from streamtap.dataset.outgoing import Outgoing
from streamtap.dataset.places import Advance, Found, no_advance
from streamtap.dataset.ranges import RangeStore
from streamtap.dataset.store_pin import StorePin, key, listing, slug
from streamtap.errors import DatasetDamaged, DatasetExists, DatasetNotFound


class StoreSource:
    """A dataset in an object store; a ``streamtap.dataset.places.Source``.

    It is pinned to the objects that were there when this machine first looked, by their ETags. What
    was fetched of them lies under ``folder``, and a second read of it asks no server; ``refresh``
    looks again. Objects without an ETag have no version, so what was fetched of them is for this ``StoreSource``
    only. ``server`` tells buckets of one name on several servers apart.
    """

    version: None = None

    def __init__(self, url: str, folder: Path, *, refresh: bool = False, server: str | None = None) -> None:
        """Nothing is asked of the server yet.

        Raises:
            InvalidInput: not an address of an object store, or one that holds credentials.
        """
        self._store = BlobStore(url)
        self.name = self._store.url
        self._folder = folder / "stores" / slug(self.name, server)
        self._pin = StorePin(self._store, self._folder)
        self._ranges = RangeStore(self._folder / "ranges")
        self._refresh = refresh
        self._lock = Lock()
        self._pinned: Mapping[str, Blob] | None = None
        self._fetched: set[str] = set()

    def on_disk(self, path: str) -> Path | None:
        """See ``Source.on_disk``."""
        known = self._known()
        blob = known.get(inside(path, self.name)) if known else None
        return self._whole(blob) if blob else None

    def size_bytes(self, path: str) -> int:
        """See ``Source.size_bytes``."""
        return self._blob(path).size_bytes

    def fetch(self, path: str, *, again: bool = False, advance: Advance = no_advance) -> Path:
        """See ``Source.fetch``."""
        blob = self._blob(path)
        whole = self._whole(blob)
        if whole is not None and not again:
            return whole
        if again:
            self._ranges.forget(key(blob))
        with self._replaced_is_said(path):
            self._store.download(blob, self._place(blob), advance=advance)
        self._fetched.add(blob.path)
        return self._place(blob)

    def read_range(self, path: str, start: int, stop: int) -> bytes:
        """See ``Source.read_range``."""
        blob = self._blob(path)
        stop = min(stop, blob.size_bytes)
        if stop <= start:
            return b""
        if whole := self._whole(blob):
            with whole.open("rb") as stream:
                stream.seek(start)
                return stream.read(stop - start)
        held = None if blob.etag is None else self._ranges.read(key(blob), start, stop)
        if held is not None:
            return held
        with self._replaced_is_said(path):
            data = self._store.get_range(path, start, stop, etag=blob.etag)
        if blob.etag is not None:
            self._ranges.write(key(blob), start, data)
        return data

    def read_tail(self, path: str, n_bytes: int) -> tuple[bytes, int]:
        """See ``Source.read_tail``."""
        size = self.size_bytes(path)
        return self.read_range(path, max(0, size - max(0, n_bytes)), size), size

    def _blob(self, path: str) -> Blob:
        with self._lock:
            if self._pinned is None:
                known = None if self._refresh else self._pin.known()
                self._pinned = self._pin.look() if known is None else known
            pinned = self._pinned
        try:
            return pinned[inside(path, self.name)]
        except KeyError:
            raise DatasetNotFound(f"{self.name} holds no file {path}.") from None

    def _known(self) -> Mapping[str, Blob] | None:
        with self._lock:
            return self._pinned or (None if self._refresh else self._pin.known())

    def _place(self, blob: Blob) -> Path:
        """Where a version of a file lies when it is whole; what two versions of a dataset share is kept once."""
        return self._folder / "files" / key(blob) / blob.path.rpartition("/")[2]

    def _whole(self, blob: Blob) -> Path | None:
        # What an earlier session left of an object without an ETag may be of an older one.
        if blob.etag is None and blob.path not in self._fetched:
            return None
        file = self._place(blob)
        return file if file.is_file() else None

    @contextmanager
    def _replaced_is_said(self, path: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise DatasetDamaged(
                f"{path} of {self.name} was replaced or removed since this machine first read the dataset; pass "
                "refresh=True (--refresh) to read what is there now."
            ) from error


class StoreTarget:
    """An address to publish to; a ``streamtap.dataset.places.Target``.

    Objects cannot be replaced together in one step, and their names are given by the format. So the
    index of an older dataset is removed before the first of its shards is replaced, and the new one
    is put last: in between, readers find no dataset rather than a mixed one.
    """

    def __init__(self, url: str, folder: Path, *, server: str | None = None) -> None:
        """Files wait under ``folder`` until they are sent; nothing is asked of the server yet.

        Raises:
            InvalidInput: not an address of an object store, or one that holds credentials.
        """
        self._store = BlobStore(url)
        self.name = self.url = self._store.url
        self._folder, self._server = folder, server
        self._pin = StorePin(self._store, folder / "stores" / slug(self.name, server))
        self._outgoing = Outgoing(folder / "outgoing")
        self._lock = Lock()
        self._there: dict[str, Blob] | None = None
        self._cut: set[str] = set()
        self._put: set[str] = set()

    @property
    def is_local(self) -> bool:
        """It is not."""
        return False

    def look(self) -> Found | None:
        """See ``Target.look``; shards without an index are left from a push that was cut, and no dataset."""
        self._outgoing.sweep()
        there = self._seen(again=True)
        shown = {path: blob.size_bytes for path, blob in there.items() if INDEX in there or not is_ours(path)}
        return Found(shown) if shown else None

    def source(self) -> StoreSource:
        """See ``Target.source``."""
        return StoreSource(self.url, self._folder, refresh=True, server=self._server)

    def room(self, path: str) -> Path:
        """See ``Target.room``."""
        return self._outgoing.room(inside(path, self.name))

    def put(self, path: str, file: Path, *, advance: Advance = no_advance) -> None:
        """See ``Target.put``; what the store holds already, by its SHA-256, is not sent again."""
        digest, size = _sha256(file), file.stat().st_size
        there = self._seen().get(inside(path, self.name))
        if there is not None and there.size_bytes == size and self._store.digest(path) == digest:
            advance(size)
        else:
            self._take_down()
            self._store.put_file(path, file, digest=digest, advance=advance)
        with self._lock:
            self._put.add(path)
        file.unlink()

    def publish(self, files: Mapping[str, Path], stale: Sequence[str], message: str) -> str:
        """See ``Target.publish``; that somebody else published is noticed up to the moment before the index is put."""
        self._require_unchanged(self._seen())
        for path in sorted(files, key=lambda path: (path == INDEX, path == CARD)):
            self._store.put_file(path, files[path], digest=_sha256(files[path]))
        self._pin.forget()
        gone = {path for path in stale if is_ours(path)} | self._cut
        for path in sorted(gone - self._put - set(files)):
            self._store.delete(path)
        with self._lock:
            self._there = None
            self._put.clear()
        return self.url

    def close(self) -> None:
        """See ``Target.close``."""
        self._outgoing.close()

    def _seen(self, *, again: bool = False) -> dict[str, Blob]:
        with self._lock:
            if again or self._there is None:
                self._there = listing(self._store)
                self._cut = set() if INDEX in self._there else {path for path in self._there if is_ours(path)}
            return self._there

    def _take_down(self) -> None:
        """Remove the index of the dataset that is being replaced."""
        seen = self._seen()
        with self._lock:
            if INDEX in seen:
                self._require_unchanged(seen)
                self._store.delete(INDEX)
                del seen[INDEX]

    def _require_unchanged(self, seen: Mapping[str, Blob]) -> None:
        try:
            now = self._store.head(INDEX)
        except FileNotFoundError:
            now = None
        if now != seen.get(INDEX):
            raise DatasetExists(f"somebody else published to {self.name} while this ran; push again to replace that.")


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
