"""From the name of a run's folder to the place that it means."""

from __future__ import annotations

import os
import re
from pathlib import Path

from streamtap.blobs import RETRY_SECONDS, SCHEMES
from streamtap.errors import InvalidInput
from streamtap.harvested.folder_place import FolderPlace
from streamtap.harvested.places import WritablePlace
from streamtap.harvested.store_place import StorePlace

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_FORMS = "the place of a run is a folder, or an address 's3://bucket/folder', 'gs://bucket/folder' or 'az://container/folder'"


def open_place(url: str | Path, *, retry_seconds: float = RETRY_SECONDS) -> WritablePlace:
    """The folder or object store called ``url``; nothing is made there, and no server is asked yet.

    ``retry_seconds`` is how long a store may fail before a call on the place gives up.

    Raises:
        InvalidInput: a name of another form, or one that holds credentials.
    """
    text = os.fspath(url)
    if not text.strip():
        raise InvalidInput(f"{_FORMS}; got an empty name.")
    scheme = None if isinstance(url, Path) else _SCHEME.match(text)
    if scheme is None:
        return FolderPlace(text)
    # What follows may hold a password, and is not repeated.
    if scheme[1] not in SCHEMES:
        raise InvalidInput(f"{_FORMS}; got an address that starts with {scheme[1]}://.")
    return StorePlace(text, retry_seconds=retry_seconds)
