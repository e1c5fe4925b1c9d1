"""What the main branch of a dataset repository holds, and whether that is what we are about to put there."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from streamtap.dataset import names
from streamtap.dataset.hub_calls import HubCalls
from streamtap.errors import DatasetNotFound

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, DatasetInfo
    from huggingface_hub.hf_api import RepoFile

BRANCH = "main"


@dataclass(frozen=True)
class HeldFile:
    """A file in a repository: git's hash of it, or the SHA-256 of one that is kept outside of git."""

    size_bytes: int
    git_hash: str
    sha256: str | None


@dataclass(frozen=True)
class Head:
    """One commit."""

    commit: str | None
    private: bool | None
    files: Mapping[str, HeldFile]

    def ours(self) -> dict[str, HeldFile]:
        """The files of the format."""
        return {path: file for path, file in self.files.items() if names.is_ours(path)}

    def holds(self, additions: Iterable[CommitOperationAdd], removed: Iterable[str]) -> bool:
        """Whether a commit of these changes would change nothing."""
        return not any(path in self.files for path in removed) and all(map(self._holds, additions))

    def _holds(self, addition: CommitOperationAdd) -> bool:
        held = self.files.get(addition.path_in_repo)
        if held is None or held.size_bytes != addition.upload_info.size:
            return False
        if held.sha256 is not None:
            return held.sha256 == addition.upload_info.sha256.hex()
        return held.git_hash == _git_hash(addition)


def look_at(calls: HubCalls) -> Head | None:
    """The newest commit of the main branch; None where this user sees no such repository."""
    doing = f"looking at {calls.repo_id}"
    try:
        info = calls.call(doing, lambda: _info(calls))
    except DatasetNotFound:
        return None
    commit = info.sha
    files = [] if commit is None else calls.call(doing, lambda: _files(calls, commit))
    return Head(commit, info.private, {file.path: _held(file) for file in files})


def _info(calls: HubCalls) -> DatasetInfo:
    return calls.api.dataset_info(calls.repo_id, expand=["sha", "private"], timeout=calls.timeout_seconds)


def _files(calls: HubCalls, commit: str) -> list[RepoFile]:
    from huggingface_hub.hf_api import RepoFile

    # It comes in pages; the list that a repository's description holds may be cut.
    tree = calls.api.list_repo_tree(calls.repo_id, repo_type="dataset", revision=commit, recursive=True)
    return [entry for entry in tree if isinstance(entry, RepoFile)]


def _held(file: RepoFile) -> HeldFile:
    return HeldFile(file.size, file.blob_id, file.lfs.sha256 if file.lfs else None)


def _git_hash(addition: CommitOperationAdd) -> str | None:
    """Git's hash of a small file; None for a large one, whose bytes are no longer on this machine."""
    content = addition.path_or_fileobj
    if not isinstance(content, str):
        return None
    data = Path(content).read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
