"""Brings a whole run to a folder of this machine: gone on with where it broke off, every file checked, manifest last.

::

    manifest ─► .shard.fetched, piece by piece ─► size and hash as the manifest says ─► shard ─► statistics ─► manifest
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from streamtap.errors import HarvestDamaged, HarvestFailed, HarvestMismatch, NotEnoughSpace
from streamtap.harvested.folder_place import FolderPlace
from streamtap.harvested.manifest import NAME, STATS_NAME, HarvestManifest, ShardEntry, read_manifest
from streamtap.harvested.places import Place
from streamtap.harvested.shard_reader import file_name

#: Told of bytes that are here and of all that there are; from several threads, one at a time.
OnBytes = Callable[[int, int], None]

_AT_ONCE = 4
_PIECE_BYTES = 1 << 23
_BEGUN = "run.json"


def nobody(_here: int, _all: int) -> None:
    """Tell nobody."""


def never() -> bool:
    """Go on."""
    return False


@dataclass(frozen=True)
class Wanted:
    """A shard file that is to be brought, and the name that it gets."""

    place: Place
    entry: ShardEntry
    name: str

    def is_at(self, file: Path) -> bool:
        """Whether ``file`` is it already."""
        return file.is_file() and file.stat().st_size == self.entry.bytes and file_sha256(file) == self.entry.sha256

    def take(self, part: Path, target: FolderPlace) -> None:
        """Give ``part``, whose size and hash are right, its name."""
        target.put_file(self.name, part, sha256=self.entry.sha256)


def fetch_run(
    place: Place, folder: str | Path, *, on_bytes: OnBytes = nobody, should_stop: Callable[[], bool] = never
) -> HarvestManifest:
    """Copy the run at ``place`` into ``folder``; what is whole there is not fetched again.

    ``should_stop`` is asked between pieces of some MB.

    Raises:
        HarvestDamaged: there is no whole run, or a file that does not fit its manifest.
        HarvestMismatch: another run is in the folder, or another process fetches into it.
        HarvestFailed: ``should_stop`` said so; the same call goes on.
        NotEnoughSpace: the disk is full; the same call goes on once there is room.
        TransferFailed: the store or server failed for longer than it was given; the same call goes on.
    """
    raw = read_file(place, NAME)
    manifest = read_manifest(raw, f"{place.url}/{NAME}")
    with folder_of(folder, manifest.run_id) as target:
        wanted = [Wanted(place, entry, file_name(entry)) for entry in manifest.shards]
        fetch_files(wanted, target, on_bytes, should_stop)
        name = str(manifest.statistics.get("file", STATS_NAME))
        target.put(name, read_file(place, name))
        target.put(NAME, raw)
    return manifest


@contextmanager
def folder_of(folder: str | Path, run_id: str) -> Iterator[FolderPlace]:
    """The folder of a run while it is brought, which is made; nobody else brings anything into it.

    Raises:
        HarvestMismatch: another run is in the folder, or another process fetches into it.
        NotEnoughSpace: in place of the system's error.
    """
    target = FolderPlace(folder)
    _check_same(target, run_id)
    target.folder.mkdir(parents=True, exist_ok=True)
    with _said_of(target.folder), _alone_in(target.folder):
        yield target


def fetch_files(
    wanted: Sequence[Wanted], target: FolderPlace, on_bytes: OnBytes, should_stop: Callable[[], bool]
) -> None:
    """Bring all shard files, a few at once; a part of one stays beside them until it is whole.

    Raises:
        HarvestDamaged, HarvestFailed, NotEnoughSpace, TransferFailed: as ``fetch_run``.
    """
    fetching = _Fetching(wanted, target, on_bytes, should_stop)
    fetching.check_room()
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="streamtap-fetch") as pool:
        coming = [pool.submit(fetching.one, each) for each in wanted]
        try:
            for each in as_completed(coming):
                each.result()
        except BaseException:
            fetching.ended.set()
            pool.shutdown(cancel_futures=True)
            raise


class _Fetching:
    def __init__(
        self, wanted: Sequence[Wanted], target: FolderPlace, on_bytes: OnBytes, should_stop: Callable[[], bool]
    ) -> None:
        self._wanted, self._target = wanted, target
        self._on_bytes, self._should_stop = on_bytes, should_stop
        self._here, self._all = 0, sum(each.entry.bytes for each in wanted)
        self._counting, self.ended = threading.Lock(), threading.Event()

    def one(self, wanted: Wanted) -> None:
        """Bring a file, unless it is here."""
        if wanted.is_at(self._target.path(wanted.name)):
            self._count(wanted.entry.bytes)
            return
        part = self._part(wanted)
        # What an earlier try left may be of another run; then the hash differs, and it is fetched from the start.
        for anew in (False, True):
            self._fetch(wanted, part, anew=anew)
            if file_sha256(part) == wanted.entry.sha256:
                wanted.take(part, self._target)
                return
            part.unlink()
        raise HarvestDamaged(f"{_named(wanted)} has another content than its manifest says; harvest it again.")

    def _fetch(self, wanted: Wanted, part: Path, *, anew: bool) -> None:
        size, name = wanted.entry.bytes, file_name(wanted.entry)
        with part.open("wb" if anew else "ab", buffering=0) as file:
            if file.tell() > size:
                file.truncate(0)
            start = file.seek(0, 2)
            if not anew:
                self._count(start)
            while start < size:
                self._stop_if_told()
                piece = read_file(wanted.place, name, start, min(start + _PIECE_BYTES, size))
                if not piece:
                    raise HarvestDamaged(f"{_named(wanted)} ends after {start} bytes; its manifest says {size}.")
                _write_all(file.write, piece)
                start += len(piece)
                if not anew:
                    self._count(len(piece))

    def check_room(self) -> None:
        """Refuse what the disk cannot take before anything is brought."""
        folder = self._target.folder
        sizes = {file.name: file.stat().st_size for file in folder.iterdir() if file.is_file()}
        here = sum(max(sizes.get(each.name, 0), sizes.get(self._part(each).name, 0)) for each in self._wanted)
        free = shutil.disk_usage(folder).free
        if self._all - here > free:
            raise NotEnoughSpace(
                f"the run has {self._all - here} bytes to bring, and {folder} has room for {free}; free some space, or "
                "name another folder."
            )

    def _part(self, wanted: Wanted) -> Path:
        return self._target.folder / f".{wanted.name}.fetched"

    def _count(self, count: int) -> None:
        with self._counting:
            self._here += count
            self._on_bytes(self._here, self._all)

    def _stop_if_told(self) -> None:
        if self.ended.is_set() or self._should_stop():
            raise HarvestFailed("the download was stopped; the same call goes on with it.")


def _check_same(target: FolderPlace, run_id: str) -> None:
    for name in (NAME, _BEGUN):
        try:
            found = json.loads(target.get(name)).get("run_id")
        except FileNotFoundError:
            continue
        except (ValueError, AttributeError):
            found = None
        if found != run_id:
            raise HarvestMismatch(
                f"{target.url} holds run {found or 'of an unknown name'}, not {run_id}; name another folder."
            )


def read_file(place: Place, name: str, start: int | None = None, stop: int = 0) -> bytes:
    """A file, or bytes [start, stop) of it.

    Raises:
        HarvestDamaged: there is none.
    """
    try:
        return place.get(name) if start is None else place.get_range(name, start, stop)
    except FileNotFoundError as error:
        raise HarvestDamaged(f"{name} of {place.url} is missing, or kept no longer.") from error


def _named(wanted: Wanted) -> str:
    return f"{file_name(wanted.entry)} of {wanted.place.url}"


def _write_all(write: Callable[[memoryview], int | None], data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[write(rest) or 0 :]


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise HarvestMismatch(
            f"another process downloads into {folder}; wait for it, or name another folder."
        ) from error
    finally:
        os.close(lock)


@contextmanager
def _said_of(folder: Path) -> Iterator[None]:
    try:
        yield
    except NotEnoughSpace:
        raise
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise NotEnoughSpace(
            f"{folder} is full ({error.strerror}); free some space, and the same call goes on."
        ) from error
