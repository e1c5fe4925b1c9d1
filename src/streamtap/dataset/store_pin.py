"""Which objects make a dataset in an object store, as this machine first saw them."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from urllib.parse import quote

from streamtap.blobs import Blob, BlobStore
from streamtap.dataset.names import FOLDERS, INDEX
from streamtap.errors import DatasetNotFound, TransferFailed

_LOOKS = 3
_READABLE = 80


class StorePin:
    """What lies under one address, on disk in ``folder``."""

    def __init__(self, store: BlobStore, folder: Path) -> None:
        self._store = store
        self._file = folder / "pin.json"

    def known(self) -> dict[str, Blob] | None:
        """The objects that were seen last, by path; None where none were. Asks no server."""
        try:
            blobs = [Blob(path, size, etag) for path, size, etag in json.loads(self._file.read_bytes())["files"]]
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            # Damaged, which the next look mends.
            return None
        # Without an ETag nobody can tell whether an object is still the one that was seen.
        return {blob.path: blob for blob in blobs} if all(blob.etag is not None for blob in blobs) else None

    def forget(self) -> None:
        """Another dataset is there now; the next to read it on this machine looks."""
        self._file.unlink(missing_ok=True)

    def look(self) -> dict[str, Blob]:
        """The objects that are there now, which become the known ones.

        Raises:
            DatasetNotFound: there is no index.
            TransferFailed: the server failed for too long, or (``AccessDenied``) refuses us.
        """
        for _ in range(_LOOKS):
            found = listing(self._store)
            # A push removes the index first and puts it last, so what was listed under one index is of one version.
            if INDEX in found and _still_there(self._store, found[INDEX]):
                self._remember(found)
                return found
            if INDEX not in found:
                raise DatasetNotFound(f"{self._store.url} holds no dataset: {INDEX} is not there.")
        raise TransferFailed(f"{self._store.url} is being replaced by another dataset; try again later.")

    def _remember(self, found: Mapping[str, Blob]) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        files = [[blob.path, blob.size_bytes, blob.etag] for blob in found.values()]
        draft = self._file.with_name(f".{self._file.name}.{secrets.token_hex(4)}")
        draft.write_text(json.dumps({"url": self._store.url, "files": files}), encoding="utf-8")
        os.replace(draft, self._file)


def listing(store: BlobStore) -> dict[str, Blob]:
    """Objects right below the address and in the format's folders, by path; other folders are not looked into.

    Raises:
        DatasetNotFound: no such bucket.
        TransferFailed: the server failed for too long, or (``AccessDenied``) refuses us.
    """
    try:
        top, folders = store.entries()
        ours = [folder for folder in folders if folder + "/" in FOLDERS]
        return {blob.path: blob for blob in chain(top, *map(store.walk, ours))}
    except FileNotFoundError as error:
        raise DatasetNotFound(f"{store.url}: there is no such bucket.") from error


def slug(url: str, server: str | None) -> str:
    """A folder's name for an address, readable and its own; the same bucket on another ``server`` is another one."""
    digest = hashlib.sha256(f"{server or ''}\n{url}".encode()).hexdigest()
    return f"{quote(url.replace('://', '-').replace('/', '-'), safe=' ')[:_READABLE]}-{digest[:16]}"


def key(blob: Blob) -> str:
    """A name for one version of one object, of which only an ETag tells."""
    return hashlib.sha256(f"{blob.path}\n{blob.size_bytes}\n{blob.etag}".encode()).hexdigest()[:32]


def _still_there(store: BlobStore, blob: Blob) -> bool:
    try:
        return store.head(blob.path) == blob
    except FileNotFoundError:
        return False
