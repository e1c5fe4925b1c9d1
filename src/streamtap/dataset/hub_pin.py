"""Which commit a branch or tag of a Hub dataset was when this machine last saw it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import quote
from uuid import uuid4

from streamtap.dataset import names
from streamtap.errors import InvalidInput

_COMMIT = re.compile(r"[0-9a-f]{40}")
_DEFAULT_BRANCH = "main"


class Pin:
    """What is known on this machine of one revision of one repository.

    Two places say it: a folder of ours, of one server each, and the Hub client's own cache, which all servers
    share. So what that cache says is only believed of a commit that our folder knows too, unless
    ``believes_client``; then also of one that came by other programs and is known of no other server.
    Of two that are believed, the one that was written last is right.
    """

    def __init__(
        self,
        repo_id: str,
        revision: str | None,
        hub_cache_dir: Path,
        folder: Path,
        *,
        believes_client: bool = False,
    ) -> None:
        self._repo_id = repo_id
        self._believes_client = believes_client
        self._revision = _checked_revision(revision)
        self._hub_cache_dir = hub_cache_dir
        repo_folder = "datasets--" + repo_id.replace("/", "--")
        self._hub_ref = hub_cache_dir / repo_folder / "refs" / self._revision
        self._folder = folder
        self._our_ref = folder / "refs" / quote(self._revision, safe="")

    @property
    def is_a_commit(self) -> bool:
        """Whether the revision is a full commit, which never becomes another one."""
        return _COMMIT.fullmatch(self._revision) is not None

    def known(self) -> str | None:
        """The commit, if something of it is on this machine."""
        if self.is_a_commit:
            return self._revision
        seen = [(_written(ref), commit) for ref, commit in self._candidates() if commit is not None]
        return max(seen)[1] if seen else self._told_by_client()

    def remember(self, commit: str) -> None:
        """The server said so."""
        if not self.is_a_commit:
            _write(self._our_ref, commit)

    def moved_to(self, commit: str) -> None:
        """What was seen before is not the newest any more, also where nothing of this one was read yet."""
        (self._folder / commit).mkdir(parents=True, exist_ok=True)
        self.remember(commit)

    def came_whole(self, commit: str, *, is_newest: bool) -> None:
        """A whole file of the commit is in the client's cache, whose tools remove commits that no branch names."""
        (self._folder / commit).mkdir(parents=True, exist_ok=True)
        if not self.is_a_commit and (is_newest or not self._hub_ref.exists()) and _read(self._hub_ref) != commit:
            _write(self._hub_ref, commit)

    def _candidates(self) -> list[tuple[Path, str | None]]:
        hub, ours = _read(self._hub_ref), _read(self._our_ref)
        # A commit of which nothing was read may have been one without a dataset yet.
        return [
            (self._hub_ref, hub if hub and self._is_ours(hub) and self._holds_index(hub) else None),
            (self._our_ref, ours if ours and (self._is_ours(ours) or self._holds_index(ours)) else None),
        ]

    def _told_by_client(self) -> str | None:
        commit = _read(self._hub_ref) if self._believes_client else None
        if commit is None or not self._holds_index(commit):
            return None
        elsewhere = self._folder.parent.parent.glob(f"*/{self._folder.name}/{commit}")
        return None if any(elsewhere) else commit

    def _is_ours(self, commit: str) -> bool:
        """Whether something of it was read from this server."""
        return (self._folder / commit).is_dir()

    def _holds_index(self, commit: str) -> bool:
        return whole_file(self._repo_id, names.INDEX, commit, self._hub_cache_dir) is not None


def whole_file(repo_id: str, path: str, commit: str, hub_cache_dir: Path) -> Path | None:
    """A file of a commit in the Hub client's cache; None where it was not downloaded."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repo_id, path, cache_dir=hub_cache_dir, revision=commit, repo_type="dataset")
    return Path(found) if isinstance(found, str) else None


def _checked_revision(revision: str | None) -> str:
    if revision is None:
        return _DEFAULT_BRANCH
    if not revision.isprintable() or any(part in ("", ".", "..") for part in revision.split("/")):
        raise InvalidInput(f"revision must be a branch, tag or commit such as 'main'; got {revision!r}.")
    return revision


def _written(file: Path) -> int:
    return file.stat().st_mtime_ns


def _read(ref: Path) -> str | None:
    try:
        commit = ref.read_text(encoding="ascii", errors="replace").strip()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return None
    return commit if _COMMIT.fullmatch(commit) else None


def _write(ref: Path, commit: str) -> None:
    ref.parent.mkdir(parents=True, exist_ok=True)
    beside = ref.with_name(f".{uuid4().hex}")
    beside.write_text(commit, encoding="ascii")
    os.replace(beside, ref)
