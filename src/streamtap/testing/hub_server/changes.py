"""What a commit does to a tree: one operation a line, as the client sends them."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from streamtap.testing.hub_server.attributes import MOST_REGULAR_BYTES
from streamtap.testing.hub_server.objects import git_oid, is_sha256, lfs_pointer
from streamtap.testing.hub_server.repository import Entry, Repository

Tree = dict[str, Entry]

#: Brings an LFS object that the repository lacks; its entry's Xet hash if it has one.
Bring = Callable[[Repository, str], str | None]


def operations_of(body: bytes) -> tuple[dict[str, Any], list[tuple[str, dict[str, Any]]]]:
    """The header of a commit and its operations, each a key and a value.

    Raises:
        ValueError: the body is not what the client of the Hub sends.
    """
    lines = [json.loads(line) for line in body.splitlines() if line.strip()]
    pairs = [(line["key"], line["value"]) for line in lines if isinstance(line, dict)]
    if not all(isinstance(value, dict) for _, value in pairs) or [key for key, _ in pairs[:1]] != ["header"]:
        raise ValueError("a commit must be lines of {key, value}, the first of them the header")
    return pairs[0][1], pairs[1:]


def changed(
    repository: Repository, tree: Mapping[str, Entry], operations: Iterable[tuple[str, dict[str, Any]]], bring: Bring
) -> Tree:
    """``tree`` after the operations.

    Raises:
        ValueError: an operation that cannot be done.
        FileNotFoundError: it names a file or folder that is not there.
    """
    new = dict(tree)
    for key, value in operations:
        if key not in _OPERATIONS:
            raise ValueError(f"no operation is called {key!r}")
        _OPERATIONS[key](repository, new, value, bring)
    _refuse_folders_that_are_files(new)
    return new


def entry_of(content: bytes, repository: Repository) -> Entry:
    """Keep a small file's content, and say how a tree names it."""
    return Entry(git_oid(content), len(content), repository.regular.put(content), lfs=False)


def lfs_entry_of(sha256: str, size_bytes: int, xet_hash: str | None = None) -> Entry:
    """How a tree names a large file."""
    return Entry(git_oid(lfs_pointer(sha256, size_bytes)), size_bytes, sha256, lfs=True, xet_hash=xet_hash)


def _add_file(repository: Repository, tree: Tree, value: dict[str, Any], bring: Bring) -> None:
    path = _path(value)
    try:
        content = base64.b64decode(value["content"], validate=True)
    except (KeyError, TypeError, binascii.Error) as error:
        raise ValueError(f"{path}: the content must be base64") from error
    if len(content) > MOST_REGULAR_BYTES:
        raise ValueError(f"{path} has {len(content)} bytes; a file of more than {MOST_REGULAR_BYTES} must go to LFS")
    tree[path] = entry_of(content, repository)


def _add_lfs_file(repository: Repository, tree: Tree, value: dict[str, Any], bring: Bring) -> None:
    path, sha256 = _path(value), value.get("oid")
    if not isinstance(sha256, str) or not is_sha256(sha256):
        raise ValueError(f"{path}: the oid of an LFS file must be a SHA-256")
    xet_hash = bring(repository, sha256)
    if not repository.lfs.has(sha256):
        raise ValueError(f"{path}: no LFS object {sha256} was uploaded")
    size_bytes = repository.lfs.size_bytes(sha256)
    if value.get("size", size_bytes) != size_bytes:
        raise ValueError(f"{path}: the LFS object {sha256} has {size_bytes} bytes, not {value['size']}")
    tree[path] = lfs_entry_of(sha256, size_bytes, xet_hash)


def _delete_file(repository: Repository, tree: Tree, value: dict[str, Any], bring: Bring) -> None:
    path = _path(value)
    if path not in tree:
        raise FileNotFoundError(path)
    del tree[path]


def _delete_folder(repository: Repository, tree: Tree, value: dict[str, Any], bring: Bring) -> None:
    folder = _path(value).rstrip("/") + "/"
    inside = [path for path in tree if path.startswith(folder)]
    if not inside:
        raise FileNotFoundError(folder)
    for path in inside:
        del tree[path]


def _copy_file(repository: Repository, tree: Tree, value: dict[str, Any], bring: Bring) -> None:
    source = value.get("srcPath", "")
    from_tree: Mapping[str, Entry] = tree
    if revision := value.get("srcRevision"):
        commit = repository.commit_of(revision)
        from_tree = commit.tree if commit else {}
    if source not in from_tree:
        raise FileNotFoundError(source)
    tree[_path(value)] = from_tree[source]


_OPERATIONS = {
    "file": _add_file,
    "lfsFile": _add_lfs_file,
    "deletedFile": _delete_file,
    "deletedFolder": _delete_folder,
    "copyFile": _copy_file,
}


def _path(value: dict[str, Any]) -> str:
    path = value.get("path")
    if not isinstance(path, str) or any(part in ("", ".", "..", ".git") for part in path.rstrip("/").split("/")):
        raise ValueError(f"{path!r} is no path in a repository")
    return path


def _refuse_folders_that_are_files(tree: Tree) -> None:
    for path in tree:
        parts = path.split("/")
        for depth in range(1, len(parts)):
            if "/".join(parts[:depth]) in tree:
                raise ValueError(f"{'/'.join(parts[:depth])} cannot be a file and a folder")
