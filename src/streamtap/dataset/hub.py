"""A dataset on the Hugging Face Hub, to be read.

Whole files go through the Hub client's own cache, so that its tools see them and its faster transfers are used;
single rows, which that cache cannot hold, into a folder of ours.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from threading import Lock
from typing import Any

from streamtap.dataset.hub_calls import PATIENCE_SECONDS, HubCalls, quiet_bars
from streamtap.dataset.hub_pin import Pin, whole_file
from streamtap.dataset.hub_progress import Told
from streamtap.dataset.hub_ranges import HubRanges
from streamtap.dataset.places import Advance, no_advance
from streamtap.dataset.ranges import RangeStore
from streamtap.errors import InvalidInput, TransferFailed
from streamtap.settings import Settings

_SIZE_DIGITS = 20


class HubSource:
    """One commit of a dataset repository.

    ``revision`` is a branch, tag or commit, by default the main branch. What it was when it was last read
    here is what is read, without a request; ``refresh`` asks the Hub for what it is now. Files that
    other programs downloaded are not fetched again; where ``HF_HUB_OFFLINE`` is set, they are all there is.

    ``token`` is by default the one in ``HF_TOKEN`` or of ``hf auth login``; ``patience_seconds`` is how long
    to wait for a server that fails or asks to wait.

    Raises:
        MissingExtra: huggingface_hub is not installed.
        InvalidInput: a name, revision, token or address that the Hub cannot have.
    """

    def __init__(
        self,
        repo_id: str,
        revision: str | None = None,
        token: str | bool | None = None,
        endpoint: str | None = None,
        refresh: bool = False,
        settings: Settings | None = None,
        *,
        patience_seconds: float = PATIENCE_SECONDS,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        settings = settings or Settings.from_environment()
        self._calls = HubCalls(repo_id, token, endpoint, settings, patience_seconds=patience_seconds, sleep=sleep)
        self._revision = revision
        self._hub_cache_dir = settings.hub_cache_dir
        self._folder = settings.datasets_dir / "hub" / _slug(self._calls.endpoint) / repo_id.replace("/", "--")
        believes = self._calls.is_offline_here
        self._pin = Pin(repo_id, revision, settings.hub_cache_dir, self._folder, believes_client=believes)
        self._refresh = refresh and not self._pin.is_a_commit
        self._lock = Lock()
        self._pinned: _Pinned | None = None

    def __repr__(self) -> str:
        return f"HubSource({self.name!r})"

    @property
    def name(self) -> str:
        """``user/name``, with ``@revision`` where one was asked for."""
        return self._calls.repo_id if self._revision is None else f"{self._calls.repo_id}@{self._revision}"

    @property
    def version(self) -> str:
        """The commit that is read; asks the Hub for it where it is not known yet.

        Raises:
            DatasetNotFound: no such repository or revision.
            TransferFailed: the server failed for too long, or (``AccessDenied``) refuses us.
        """
        return self._at().commit

    def moved_to(self, commit: str) -> None:
        """Remember that the branch is at ``commit`` now, so that the next to read it on this machine reads that."""
        self._pin.moved_to(commit)

    def on_disk(self, path: str) -> Path | None:
        """The whole file, if it is on this machine already; nothing is asked of any server."""
        with self._lock:
            commit = self._pinned.commit if self._pinned else None if self._refresh else self._pin.known()
        return None if commit is None else self._whole(path, commit)

    def size_bytes(self, path: str) -> int:
        """Size of a file.

        Raises:
            DatasetNotFound: no such file.
            TransferFailed: the server failed for too long, or (``AccessDenied``) refuses us.
        """
        at = self._at()
        if whole := self._whole(path, at.commit):
            return whole.stat().st_size
        held = at.ranges.read(_size_of(path), 0, _SIZE_DIGITS)
        if held is not None:
            return int(held)
        size = at.remote.size_bytes(path)
        at.ranges.write(_size_of(path), 0, f"{size:0{_SIZE_DIGITS}d}".encode())
        return size

    def fetch(self, path: str, *, again: bool = False, advance: Advance = no_advance) -> Path:
        """The whole file on this machine, downloaded when it is not there; ``again`` replaces what is.

        Raises:
            DatasetNotFound: no such file.
            TransferFailed: the server failed for too long, or (``AccessDenied``) refuses us.
            NotEnoughSpace: the disk is full.
        """
        at = self._at()
        whole = self._whole(path, at.commit)
        if whole is not None and not again:
            return whole
        if whole is not None and not whole.is_symlink():
            # Where there are no links the client takes a file that is there for the new one.
            whole.unlink()
        doing = f"downloading {path} of {self._calls.repo_id}"
        with quiet_bars():
            file = self._calls.call(doing, lambda: self._download(path, at.commit, again, advance))
        self._pin.came_whole(at.commit, is_newest=at.is_newest)
        return file

    def read_range(self, path: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop) of a file, no more than these over the wire; fewer only where the file ends.

        Raises:
            DatasetNotFound: no such file.
            TransferFailed: the server failed for too long, or (``AccessDenied``) refuses us.
        """
        if not 0 <= start <= stop:
            raise InvalidInput(f"a range must be 0 <= start <= stop; got {start} and {stop}.")
        at = self._at()
        if whole := self._whole(path, at.commit):
            return _slice(whole, start, stop)
        held = at.ranges.read(path, start, stop)
        if held is not None:
            return held
        stop = min(stop, self.size_bytes(path))
        held = at.ranges.read(path, start, stop)
        if held is not None:
            return held
        data = at.remote.read(path, start, stop)
        at.ranges.write(path, start, data)
        return data

    def read_tail(self, path: str, n_bytes: int) -> tuple[bytes, int]:
        """The last ``n_bytes`` of a file, or all of a shorter one, and the file's size.

        Raises:
            DatasetNotFound: no such file.
            TransferFailed: the server failed for too long, or (``AccessDenied``) refuses us.
        """
        size = self.size_bytes(path)
        return self.read_range(path, max(0, size - max(0, n_bytes)), size), size

    def _at(self) -> _Pinned:
        with self._lock:
            if self._pinned is None:
                known = None if self._refresh else self._pin.known()
                commit = known or self._calls.call(f"looking at {self.name}", self._ask)
                if known is None:
                    self._pin.remember(commit)
                self._pinned = _Pinned(
                    commit,
                    is_newest=known is None,
                    ranges=RangeStore(self._folder / commit),
                    remote=HubRanges(self._calls, commit),
                )
            return self._pinned

    def _ask(self) -> str:
        calls = self._calls
        info = calls.api.dataset_info(
            # All files of a large dataset are a large answer.
            calls.repo_id,
            revision=self._revision,
            expand=["sha"],
            timeout=calls.timeout_seconds,
        )
        if info.sha is None:
            raise TransferFailed(f"{calls.endpoint} does not say which commit {self.name} is at; is it a Hub?")
        return info.sha

    def _whole(self, path: str, commit: str) -> Path | None:
        return whole_file(self._calls.repo_id, path, commit, self._hub_cache_dir)

    def _download(self, path: str, commit: str, again: bool, advance: Advance) -> Path:
        from huggingface_hub import hf_hub_download

        # Older clients tell nobody how far they are.
        tells = "tqdm_class" in signature(hf_hub_download).parameters
        told = Told(advance)
        options: dict[str, Any] = {"tqdm_class": told.bar_class()} if tells else {}
        try:
            file = hf_hub_download(
                self._calls.repo_id,
                path,
                repo_type="dataset",
                revision=commit,
                cache_dir=self._hub_cache_dir,
                endpoint=self._calls.endpoint,
                token=self._calls.token,
                library_name="streamtap",
                force_download=again,
                **options,
            )
        except BaseException:
            told.take_back()
            raise
        if not tells:
            advance(Path(file).stat().st_size)
        return Path(file)


@dataclass(frozen=True)
class _Pinned:
    """A commit and the ways to its bytes; ``is_newest`` if the server just said so."""

    commit: str
    is_newest: bool
    ranges: RangeStore
    remote: HubRanges


def _slug(endpoint: str) -> str:
    """A folder's name for an address, readable, and another one for each."""
    digest = hashlib.sha256(endpoint.encode()).hexdigest()[:8]
    return f"{re.sub(r'[^A-Za-z0-9.-]+', '-', endpoint.split('://', 1)[-1])}-{digest}"


def _size_of(path: str) -> str:
    """Where the store of ranges keeps a size; no file can have a path below another one's."""
    return f"{path}/size"


def _slice(file: Path, start: int, stop: int) -> bytes:
    with file.open("rb") as stream:
        stream.seek(start)
        return stream.read(stop - start)
