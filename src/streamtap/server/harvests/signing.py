"""Links to a run's files that need no key: the object store's own, or for a folder those that the gateway answers.

A gateway's link is ``/v1/harvest/files/{run_id}/{name}?expires=…&signature=…``: HMAC-SHA256 over name and expiry, with
a secret that lies beside the runs, so that every gateway of one folder takes the links of all.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Iterable
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Protocol
from urllib.parse import urlencode

from streamtap.blobs import MOST_SIGNED_SECONDS, SCHEMES, BlobStore
from streamtap.errors import AccessDenied, HarvestUnavailable, MissingExtra, SettingsError, TransferFailed
from streamtap.server.harvests.written_once import written_once

FILES = "/v1/harvest/files"
SECRET_NAME = ".link-secret"
_SECRET = re.compile(rb"[0-9a-f]{64}")
_RUN = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NAME = re.compile(r"[a-z0-9_]{1,64}\.(?:json|safetensors(?:\.zst)?)")
_EXPIRES = re.compile(r"[0-9]{1,12}", re.ASCII)


class Links(Protocol):
    """Signs links to the files of runs."""

    def prepare(self) -> None:
        """Have at hand what they are signed with.

        Raises:
            SettingsError: that cannot be.
        """
        ...

    def sign(self, run_id: str, names: Iterable[str], *, expires_at: datetime, now: datetime, base: str) -> list[str]:
        """A link to each file of a run, in order; ``base`` is how the caller reached the gateway, without a path.

        Raises:
            HarvestUnavailable: they cannot be signed just now.
        """
        ...


def links_of(store: str | Path) -> Links:
    """Whoever signs for the runs under ``store``, a folder or the address of an object store; nothing is made yet."""
    text = os.fspath(store)
    if not isinstance(store, Path) and text.partition("://")[0] in SCHEMES and "://" in text:
        return StoreLinks(BlobStore(text))
    return FolderLinks(Path(text))


class StoreLinks:
    """Links of an object store, made on this machine from its credentials; they last seven days at most."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store

    def prepare(self) -> None:
        """See ``Links.prepare``; the credentials are looked at with each link, for they may change."""

    def sign(self, run_id: str, names: Iterable[str], *, expires_at: datetime, now: datetime, base: str) -> list[str]:
        """See ``Links.sign``."""
        seconds = min(max(1.0, (expires_at - now).total_seconds()), MOST_SIGNED_SECONDS)
        try:
            return [self._store.sign(f"{run_id}/{name}", seconds) for name in names]
        except (TransferFailed, MissingExtra) as error:
            raise HarvestUnavailable(
                "links to the files cannot be signed just now; ask again, or tell whoever runs the server."
            ) from error


class FolderLinks:
    """Links to files below a folder, which ``server.surface.routes.harvest_files`` answers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def prepare(self) -> None:
        """See ``Links.prepare``; the secret is made where there is none."""
        _ = self._secret

    def sign(self, run_id: str, names: Iterable[str], *, expires_at: datetime, now: datetime, base: str) -> list[str]:
        """See ``Links.sign``."""
        expires = str(int(expires_at.timestamp()))
        return [
            f"{base}{FILES}/{run_id}/{name}?"
            + urlencode({"expires": expires, "signature": self._signature(run_id, name, expires)})
            for name in names
        ]

    def opened(self, run_id: str, name: str, *, expires: str, signature: str, now: datetime) -> Path:
        """The file that a link leads to, whether it is there or not.

        Raises:
            AccessDenied: the link was not made here, was changed, or its time is over.
        """
        if not (_RUN.fullmatch(run_id) and _NAME.fullmatch(name) and _EXPIRES.fullmatch(expires)):
            raise _forged()
        if not hmac.compare_digest(self._signature(run_id, name, expires).encode(), signature.encode()):
            raise _forged()
        if int(expires) <= now.timestamp():
            raise AccessDenied(
                "this link has expired; ask for the job again (GET /v1/harvest/{job_id}), which signs new ones while "
                "its files are kept."
            )
        return self.folder / run_id / name

    def _signature(self, run_id: str, name: str, expires: str) -> str:
        return hmac.new(self._secret, f"{run_id}/{name}\n{expires}".encode(), hashlib.sha256).hexdigest()

    @cached_property
    def _secret(self) -> bytes:
        file = self.folder / SECRET_NAME
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            found = written_once(file, secrets.token_hex(32).encode())
        except OSError as error:
            raise SettingsError(f"{self.folder} cannot keep the secret that links are signed with: {error}") from error
        if not _SECRET.fullmatch(found):
            raise SettingsError(f"{file} does not hold 64 hex digits; remove it, and links are signed anew.")
        return bytes.fromhex(found.decode())


def _forged() -> AccessDenied:
    return AccessDenied(
        "this link was not signed here, or was changed; take it whole from GET /v1/harvest/{job_id}, with its query."
    )
