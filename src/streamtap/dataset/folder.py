"""Datasets in a folder of this machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from streamtap.dataset.drafts import Draft, locked
from streamtap.dataset.inside import inside
from streamtap.dataset.names import INDEX, is_ours
from streamtap.dataset.places import Advance, Found, no_advance
from streamtap.dataset.swap import carry, carry_late, put_in_place, recover, standing, sync_file, sync_folder
from streamtap.errors import DatasetDamaged, DatasetExists, DatasetNotFound, InvalidInput

#: Device and number of a folder; number, size and time of the index in it.
_Identity = tuple[int, ...]


class FolderSource:
    """A dataset in a folder; a ``streamtap.dataset.places.Source``. Nothing is copied."""

    version: None = None

    def __init__(self, path: str | Path) -> None:
        self.name = os.fspath(path)
        self._path = Path(path).expanduser().absolute()
        self._pinned: _Identity | None = None

    def on_disk(self, path: str) -> Path | None:
        """See ``Source.on_disk``."""
        try:
            return self.fetch(path)
        except DatasetNotFound:
            return None

    def size_bytes(self, path: str) -> int:
        """See ``Source.size_bytes``."""
        return self.fetch(path).stat().st_size

    def fetch(self, path: str, *, again: bool = False, advance: Advance = no_advance) -> Path:
        """The file itself; see ``Source.fetch``."""
        file = self._root() / inside(path, self.name)
        if not file.is_file():
            raise DatasetNotFound(f"{self.name} holds no file {path}.")
        return file

    def read_range(self, path: str, start: int, stop: int) -> bytes:
        """See ``Source.read_range``."""
        with self.fetch(path).open("rb") as stream:
            stream.seek(start)
            return stream.read(max(0, stop - start))

    def read_tail(self, path: str, n_bytes: int) -> tuple[bytes, int]:
        """See ``Source.read_tail``."""
        with self.fetch(path).open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            stream.seek(max(0, size - max(0, n_bytes)))
            return stream.read(), size

    def _root(self) -> Path:
        """The folder, which is the same one at every call."""
        root = standing(self._path)
        if root is None:
            raise DatasetNotFound(
                f"{self.name} is not a folder." if self._path.exists() else f"{self.name}: no such folder."
            )
        identity = _identity(root)
        if self._pinned is None:
            self._pinned = identity
        if identity != self._pinned:
            raise DatasetDamaged(f"{self.name} was replaced while it was being read; load it again.")
        return root


class FolderTarget:
    """A folder to publish to; a ``streamtap.dataset.places.Target``.

    A push is put together in a hidden folder beside it, which then takes its place: readers see the
    old dataset or the new one. Files in it that are no part of a dataset stay.
    """

    def __init__(self, path: str | Path) -> None:
        """Nothing is written yet.

        Raises:
            InvalidInput: not a folder, or one that cannot be exchanged for another.
        """
        self.name = os.fspath(path)
        # Through a link it is the folder that is replaced, not the link.
        self._path = Path(os.path.realpath(Path(path).expanduser()))
        self._draft: Draft | None = None
        self._seen: tuple[_Identity | None] | None = None
        self._require_a_place()

    @property
    def is_local(self) -> bool:
        """It is."""
        return True

    @property
    def url(self) -> str:
        """The folder's whole path."""
        return str(self._path)

    def look(self) -> Found | None:
        """See ``Target.look``."""
        root = standing(self._path)
        self._seen = (None if root is None else _identity(root),)
        if root is None:
            return None
        files = {file.relative_to(root).as_posix(): file.stat().st_size for file in root.rglob("*") if file.is_file()}
        return Found(files)

    def source(self) -> FolderSource:
        """See ``Target.source``."""
        return FolderSource(self.name)

    def room(self, path: str) -> Path:
        """See ``Target.room``."""
        return self._drafted().room(inside(path, self.name))

    def put(self, path: str, file: Path, *, advance: Advance = no_advance) -> None:
        """See ``Target.put``."""
        place = self.room(path)
        if file != place:
            shutil.move(file, place)
        sync_file(place)
        advance(place.stat().st_size)

    def publish(self, files: Mapping[str, Path], stale: Sequence[str], message: str) -> str:
        """See ``Target.publish``; what is there and is neither put nor ``stale`` stays."""
        draft = self._drafted()
        for path, file in files.items():
            place = self.room(path)
            if file != place:
                shutil.copyfile(file, place)
            sync_file(place)
        gone = frozenset(path for path in stale if is_ours(path))
        with locked(self._path.parent):
            recover(self._path)
            self._require_unchanged()
            replaces = self._path.exists()
            if replaces:
                carry(self._path, draft.folder, lambda path: path not in gone)
            self._put_in_place(draft.folder, replaces)
        return self.url

    def close(self) -> None:
        """See ``Target.close``."""
        if self._draft is not None:
            self._draft.close()
            self._draft = None

    def _drafted(self) -> Draft:
        if self._draft is None:
            self._draft = Draft(self._path.parent, self._path.name)
        return self._draft

    def _put_in_place(self, draft: Path, replaces: bool) -> None:
        for folder, _, _ in os.walk(draft, topdown=False):
            sync_folder(Path(folder))
        try:
            old = put_in_place(draft, self._path, replaces=replaces)
        except FileExistsError:
            raise self._taken() from None
        if old is not None:
            carry_late(old, self._path, lambda path: not is_ours(path))
            shutil.rmtree(old)

    def _require_a_place(self) -> None:
        if self._path.exists() and not self._path.is_dir():
            raise InvalidInput(f"{self.name} is a file; name a folder to publish to.")
        if os.path.ismount(self._path) or Path.cwd().is_relative_to(self._path):
            raise InvalidInput(
                f"{self.name} is a mount point or the folder that this program runs in, which cannot be replaced in "
                "one step; name a folder inside it."
            )

    def _require_unchanged(self) -> None:
        now = _identity(self._path) if self._path.exists() else None
        if self._seen is not None and self._seen != (now,):
            raise self._taken()

    def _taken(self) -> DatasetExists:
        return DatasetExists(f"somebody else published to {self.name} while this ran; push again to replace that.")


def _identity(root: Path) -> _Identity:
    folder = root.stat()
    try:
        index = (root / INDEX).stat()
    except FileNotFoundError:
        return folder.st_dev, folder.st_ino
    return folder.st_dev, folder.st_ino, index.st_ino, index.st_size, index.st_mtime_ns
