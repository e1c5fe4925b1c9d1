"""A tree as the Hub lists it: files and folders, at one level or at all."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from streamtap.testing.hub_server.repository import Commit, Entry, Repository

Item = dict[str, Any]


def listed(tree: Mapping[str, Entry], folder: str, *, recursive: bool) -> list[Item] | None:
    """Files and folders below ``folder``, in order of their paths; None where there is no such folder."""
    start = f"{folder}/" if folder else ""
    inside = {path: entry for path, entry in tree.items() if path.startswith(start)}
    if folder and not inside:
        return None
    items = {path: file_item(path, entry) for path, entry in inside.items()}
    items |= {path: folder_item(path, oid) for path, oid in _folder_oids(inside).items() if path.startswith(start)}
    return [items[path] for path in sorted(items) if recursive or "/" not in path[len(start) :]]


def named(tree: Mapping[str, Entry], paths: list[str]) -> list[Item]:
    """The files and folders that ``paths`` name; what is not there is left out."""
    folders = _folder_oids(tree)
    return [
        file_item(path, tree[path]) if path in tree else folder_item(path, folders[path])
        for path in paths
        if path in tree or path in folders
    ]


def file_item(path: str, entry: Entry) -> Item:
    """A file as it stands in a list."""
    item: Item = {"type": "file", "oid": entry.oid, "size": entry.size, "path": path}
    if entry.lfs:
        item["lfs"] = {"oid": entry.sha256, "size": entry.size, "pointerSize": entry.pointer_size}
    if entry.xet_hash:
        item["xetHash"] = entry.xet_hash
    return item


def folder_item(path: str, oid: str) -> Item:
    """A folder as it stands in a list."""
    return {"type": "directory", "oid": oid, "size": 0, "path": path}


def add_last_commits(items: list[Item], repository: Repository, commit: Commit) -> None:
    """Say of each item which commit touched it last."""
    waiting = {item["path"]: item for item in items}
    for each in repository.history(commit):
        before = repository.commit_of(each.parent) if each.parent else None
        for path in [path for path in waiting if _differs(path, each, before)]:
            waiting.pop(path)["lastCommit"] = {"id": each.id, "title": each.title, "date": each.date}
        if not waiting:
            return


def _differs(path: str, commit: Commit, before: Commit | None) -> bool:
    return before is None or _below(path, commit.tree) != _below(path, before.tree)


def _below(path: str, tree: Mapping[str, Entry]) -> object:
    return tree.get(path) or {each: entry for each, entry in tree.items() if each.startswith(f"{path}/")}


def _folder_oids(tree: Mapping[str, Entry]) -> dict[str, str]:
    """An id for every folder, which changes with what is in it."""
    lines: dict[str, list[str]] = defaultdict(list)
    for path, entry in tree.items():
        folder = path
        while "/" in folder:
            folder = folder.rsplit("/", 1)[0]
            lines[folder].append(f"{path} {entry.oid}\n")
    return {folder: hashlib.sha1("".join(inside).encode()).hexdigest() for folder, inside in lines.items()}
