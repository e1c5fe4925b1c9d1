"""Where the service keeps bulk jobs: under one root, a folder or ``s3://…``, that workers and gateways reach.

::

    ROOT/harvest/RUN_ID/…             files of a run; what signed links lead to
    ROOT/harvest-inputs/JOB_ID.json   the request of a job that is not over: gone with its end

Both hold what people wrote, the files as token ids, so that in a folder only the service's own user may enter them.
"""

from __future__ import annotations

import hashlib
import shutil
import uuid
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from streamtap.errors import SettingsError, TransferFailed
from streamtap.harvested.manifest import NAME
from streamtap.harvested.opening import open_place
from streamtap.harvested.places import WritablePlace
from streamtap.server.harvests.written_once import written_once

RUNS = "harvest"
_INPUTS = "harvest-inputs"
_SUFFIX = ".json"
_IDENTITY = "store-id"
#: How long a store may fail before a job waits for better times, or a request is refused.
_RETRY_SECONDS = 60.0


class HarvestStore:
    """Runs and inputs under one root."""

    def __init__(self, root: str) -> None:
        """Nothing is made and no store is asked yet.

        Raises:
            InvalidInput: an address that is none.
        """
        self.folder = None if "://" in root else Path(root)
        self.root = open_place(root).url if self.folder is None else str(self.folder)
        self._inputs = open_place(f"{self.root}/{_INPUTS}", retry_seconds=_RETRY_SECONDS)

    @cached_property
    def identity(self) -> str:
        """What tells this store from others: a job is done by those who reach the one that holds its prompts.

        Raises:
            SettingsError: the folder cannot be used.
        """
        if self.folder is None or self._private is None:
            return hashlib.sha256(self.root.encode()).hexdigest()
        private_folder(self.folder / RUNS)
        return _identity(self._private)

    @property
    def runs(self) -> str | Path:
        """The folder, or the address, under which each run has a folder of its own."""
        return f"{self.root}/{RUNS}" if self.folder is None else self.folder / RUNS

    def run(self, run_id: str) -> WritablePlace:
        """Where the files of a run lie."""
        return open_place(f"{self.root}/{RUNS}/{run_id}", retry_seconds=_RETRY_SECONDS)

    def remove_run(self, run_id: str) -> None:
        """Remove a run's files, the manifest first: what is there of it must not look whole.

        Raises:
            TransferFailed: the store fails.
        """
        place = self.run(run_id)
        names = place.names()
        for name in sorted(names, key=lambda each: (each != NAME, each)):
            place.delete(name)
        if self.folder is not None:
            shutil.rmtree(self.folder / RUNS / run_id, ignore_errors=True)

    def put_input(self, job_id: str, body: bytes) -> None:
        """Keep the request of a job, readable for this user alone.

        Raises:
            NotEnoughSpace: the disk is full.
            SettingsError: the folder cannot be used.
            TransferFailed: the store fails.
        """
        private = self._private
        self._inputs.put(job_id + _SUFFIX, body)
        if private is not None:
            (private / (job_id + _SUFFIX)).chmod(0o600)

    def get_input(self, job_id: str) -> bytes:
        """The request of a job that is not over.

        Raises:
            FileNotFoundError: it is gone.
            TransferFailed: the store fails.
        """
        return self._inputs.get(job_id + _SUFFIX)

    def remove_input(self, job_id: str) -> None:
        """Remove the request of a job, if it is there; what a store that fails still holds is left to ``Tidying``."""
        with suppress(TransferFailed):
            self._inputs.delete(job_id + _SUFFIX)

    def input_ids(self) -> set[str]:
        """The jobs whose requests are here."""
        return {name.removesuffix(_SUFFIX) for name in self._inputs.names() if name.endswith(_SUFFIX)}

    @cached_property
    def _private(self) -> Path | None:
        """The folder of inputs, which only this user may enter; None in a store, where the bucket is private."""
        return None if self.folder is None else private_folder(self.folder / _INPUTS)


def private_folder(folder: Path) -> Path:
    """Make a folder, if it is not there, that only this user may enter.

    Raises:
        SettingsError: it cannot be.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
    except OSError as error:
        raise SettingsError(f"harvests cannot be kept in {folder}: {error.strerror}; name another store.") from error
    return folder


def _identity(folder: Path) -> str:
    """The folder's own name among stores; whoever reaches the same folder, from whatever host, finds the same."""
    try:
        return written_once(folder / _IDENTITY, uuid.uuid4().hex.encode()).decode("ascii").strip()
    except OSError as error:
        raise SettingsError(f"harvests cannot be kept in {folder}: {error.strerror}; name another store.") from error
