"""Putting one folder in the place of another, so that whoever looks sees the old one or the new one."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from streamtap.errors import InvalidInput

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NOT_HERE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


def standing(path: Path) -> Path | None:
    """The folder called ``path``: itself, or where a swap that was killed left it; None if there is none."""
    return next((each for each in (path, _aside(path)) if each.is_dir()), None)


def recover(path: Path) -> None:
    """Finish or undo a swap that was killed; for one process at a time."""
    aside = _aside(path)
    if not aside.exists():
        return
    if path.exists():
        shutil.rmtree(aside)
    else:
        aside.rename(path)


def put_in_place(draft: Path, path: Path, *, replaces: bool) -> Path | None:
    """Make ``draft`` the folder at ``path``; where the one that it ``replaces`` lies now, for its remover.

    Raises:
        FileExistsError: nothing was to be replaced, and something came to be there.
    """
    if not replaces:
        _rename_to_nothing(draft, path)
        old = None
    elif _exchange(draft, path):
        old = draft
    else:
        # Two renames, and a reader that comes between finds the old one by its other name: see `standing`.
        old = _aside(path)
        path.rename(old)
        draft.rename(path)
    sync_folder(path.parent)
    return old


def carry(old: Path, new: Path, wanted: Callable[[str], bool]) -> None:
    """Give ``new`` the files of ``old`` that are ``wanted`` and that it lacks, as links: both have them.

    Raises:
        InvalidInput: another disk is mounted inside.
    """
    folders = [(os.fspath(old), new)]
    for entry, path in _entries(old):
        copy = new / path
        if entry.is_dir(follow_symlinks=False):
            if os.path.ismount(entry.path):
                raise InvalidInput(f"{entry.path} is a mount point; publish to a folder that has none inside.")
            copy.mkdir(exist_ok=True)
            folders.append((entry.path, copy))
        elif wanted(path) and not os.path.lexists(copy):
            _link(entry, copy)
    # Last, for nothing can be put into a folder that is read-only.
    for original, folder in reversed(folders):
        shutil.copystat(original, folder)


def carry_late(old: Path, new: Path, wanted: Callable[[str], bool]) -> None:
    """Move what was changed in ``old`` between ``carry`` and the swap."""
    for entry, path in _entries(old):
        moved = new / path
        if entry.is_dir(follow_symlinks=False):
            moved.mkdir(exist_ok=True)
        elif wanted(path) and not (os.path.lexists(moved) and os.path.samestat(moved.lstat(), os.lstat(entry.path))):
            os.replace(entry.path, moved)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_file(file: Path) -> None:
    """Wait until what a file holds is durable."""
    with file.open("rb") as stream:
        os.fsync(stream.fileno())


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.streamtap-old")


def _rename_to_nothing(draft: Path, path: Path) -> None:
    try:
        draft.rename(path)
    except (NotADirectoryError, FileExistsError) as error:
        raise FileExistsError(str(path)) from error
    except OSError as error:
        if error.errno == errno.ENOTEMPTY:
            raise FileExistsError(str(path)) from error
        raise


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step; False where the system or the file system has no such step."""
    libc = ctypes.CDLL(None, use_errno=True)
    names = os.fsencode(one), os.fsencode(other)
    try:
        if sys.platform == "darwin":
            failed = libc.renamex_np(*names, _RENAME_EXCHANGE)
        else:
            failed = libc.renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE)
    except AttributeError:
        return False
    if not failed:
        return True
    number = ctypes.get_errno()
    if number in _NOT_HERE:
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


def _entries(root: Path, below: str = "") -> Iterator[tuple[os.DirEntry[str], str]]:
    """All that lies under ``root``, a folder before what is in it; links are not followed."""
    with os.scandir(root / below) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        path = f"{below}{entry.name}"
        yield entry, path
        if entry.is_dir(follow_symlinks=False):
            yield from _entries(root, f"{path}/")


def _link(entry: os.DirEntry[str], copy: Path) -> None:
    if entry.is_symlink():
        copy.symlink_to(os.readlink(entry.path))
        return
    try:
        os.link(entry.path, copy)
    except OSError:
        # A file system without hard links.
        shutil.copy2(entry.path, copy)
        sync_file(copy)
