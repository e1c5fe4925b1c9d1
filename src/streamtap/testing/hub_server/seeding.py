"""A local folder as a commit, without HTTP."""

from __future__ import annotations

from pathlib import Path

from streamtap.errors import InvalidInput
from streamtap.testing.hub_server.attributes import goes_to_lfs, lfs_patterns
from streamtap.testing.hub_server.changes import lfs_entry_of
from streamtap.testing.hub_server.objects import git_oid_of
from streamtap.testing.hub_server.repository import MAIN, Commit, Entry, Repository

_SAMPLE_BYTES = 512


def commit_folder(repository: Repository, folder: Path, *, title: str, author: str) -> Commit:
    """Commit every file below ``folder`` on top of ``main``; those of equal paths are replaced.

    Raises:
        InvalidInput: there is no such folder, or no file in it.
    """
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    if not files:
        raise InvalidInput(f"{folder} must be a folder with files in it; there are none.")
    with repository.lock:
        before = repository.commit_of(MAIN)
        tree = dict(before.tree) if before else {}
        patterns = lfs_patterns(_text(repository, tree.get(".gitattributes")))
        for file in files:
            path = file.relative_to(folder).as_posix()
            tree[path] = _kept(repository, file, path, patterns)
        return repository.add_commit(MAIN, tree, title=title, author=author)


def _kept(repository: Repository, file: Path, path: str, patterns: list[str]) -> Entry:
    with file.open("rb") as stream:
        sample = stream.read(_SAMPLE_BYTES)
    size = file.stat().st_size
    if goes_to_lfs(path, size, sample, patterns):
        return lfs_entry_of(repository.lfs.put_file(file), size)
    return Entry(git_oid_of(file), size, repository.regular.put_file(file), lfs=False)


def _text(repository: Repository, entry: Entry | None) -> str:
    return repository.content(entry).read_text("utf-8", "replace") if entry else ""
