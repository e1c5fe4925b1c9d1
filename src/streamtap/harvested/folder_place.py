"""A run's files in a folder of this machine."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from streamtap.errors import InvalidInput, NotEnoughSpace
from streamtap.harvested.places import checked_name

_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_FOLDER = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST)


class FolderPlace:
    """A folder; a ``streamtap.harvested.places.WritablePlace``. It is made with the first file.

    A file appears under its name when it is whole and durable. Whoever writes the same name at the same time waits.
    """

    def __init__(self, path: str | Path) -> None:
        """Nothing is made yet.

        Raises:
            InvalidInput: it is a file.
        """
        self.folder = Path(path).expanduser().absolute()
        if self.folder.exists() and not self.folder.is_dir():
            raise InvalidInput(f"{self.folder} is a file; a run needs a folder.")

    @property
    def url(self) -> str:
        """The folder's whole path."""
        return str(self.folder)

    def check(self) -> None:
        """See ``WritablePlace.check``; the folder, or the one that it would be made in."""
        there = next(path for path in (self.folder, *self.folder.parents) if path.exists())
        if not there.is_dir():
            raise self._not_here(f"{there} is a file")
        if not os.access(there, os.W_OK | os.X_OK):
            raise self._not_here(f"{there} takes no files of this user")

    def path(self, name: str) -> Path:
        """Where a file lies, or would."""
        return self.folder / checked_name(name)

    def get(self, name: str) -> bytes:
        """See ``Place.get``."""
        return self.path(name).read_bytes()

    def get_range(self, name: str, start: int, stop: int) -> bytes:
        """See ``Place.get_range``."""
        with self.path(name).open("rb", buffering=0) as file:
            return b"".join(_pieces(file, start, min(stop, os.fstat(file.fileno()).st_size)))

    def size(self, name: str) -> int | None:
        """See ``WritablePlace.size``."""
        try:
            return self.path(name).stat().st_size
        except FileNotFoundError:
            return None

    def names(self) -> set[str]:
        """See ``WritablePlace.names``."""
        if not self.folder.is_dir():
            return set()
        return {entry.name for entry in os.scandir(self.folder) if not entry.name.startswith(".") and entry.is_file()}

    def put(self, name: str, data: bytes) -> None:
        """See ``WritablePlace.put``."""
        self._write(name, lambda file: _write_all(file, data))

    def put_file(self, name: str, file: Path, *, sha256: str) -> None:
        """See ``WritablePlace.put_file``; on one disk the file is moved, and its bytes are not touched."""
        place = self.path(name)
        with self._said(name):
            self.folder.mkdir(parents=True, exist_ok=True)
            _sync(file)
            try:
                file.replace(place)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
            else:
                _sync(self.folder)
                return
        self._write(name, lambda target: _copy(file, target))
        file.unlink()

    def delete(self, name: str) -> None:
        """See ``WritablePlace.delete``."""
        self.path(name).unlink(missing_ok=True)

    def _write(self, name: str, write: Callable[[BinaryIO], None]) -> None:
        place = self.path(name)
        with self._said(name):
            self.folder.mkdir(parents=True, exist_ok=True)
            part = self.folder / f".{name}.part"
            with _alone_at(part) as file:
                write(file)
                os.fsync(file.fileno())
                part.replace(place)
            _sync(self.folder)

    def _not_here(self, why: str | None) -> InvalidInput:
        return InvalidInput(f"{self.folder} cannot be written to ({why}); name a folder of yours.")

    @contextmanager
    def _said(self, name: str) -> Iterator[None]:
        """Tell a full disk, and a folder that cannot be, from all else that can go wrong."""
        try:
            yield
        except OSError as error:
            if error.errno in _FULL:
                raise NotEnoughSpace(
                    f"{self.folder} has no room for {name} ({error.strerror}); free some space and run the same "
                    "command again."
                ) from error
            if error.errno in _NO_FOLDER:
                raise self._not_here(error.strerror) from error
            raise


def _pieces(file: BinaryIO, start: int, stop: int) -> Iterator[bytes]:
    file.seek(start)
    left = stop - start
    while left > 0 and (piece := file.read(left)):
        left -= len(piece)
        yield piece


def _write_all(file: BinaryIO, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _copy(source: Path, target: BinaryIO) -> None:
    with source.open("rb") as stream:
        shutil.copyfileobj(stream, target, 1 << 20)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _alone_at(part: Path) -> Iterator[BinaryIO]:
    """An empty file at ``part`` that nobody else writes; what is left of it in the end is removed."""
    file = _opened(part)
    try:
        file.truncate(0)
        yield file
    finally:
        if _is_at(part, file):
            part.unlink()
        file.close()


def _opened(part: Path) -> BinaryIO:
    while True:
        file = os.fdopen(os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "wb", buffering=0)
        fcntl.flock(file, fcntl.LOCK_EX)
        # While we waited it may have been renamed to the finished file, or removed.
        if _is_at(part, file):
            return file
        file.close()


def _is_at(path: Path, file: BinaryIO) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
