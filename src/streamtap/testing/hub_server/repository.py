"""One repository on disk: commits that are never changed, and one file that says which is where.

::

    datasets/tester/things/
        repository.json      visibility, branches, tags
        commits/<id>.json    one commit, with its whole tree
        lfs/, regular/       contents, by SHA-256
"""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

from streamtap.testing.hub_server.objects import ObjectStore, lfs_pointer
from streamtap.workbench.whole_file import write_whole

MAIN = "main"


@dataclass(frozen=True)
class Entry:
    """A file in a tree: the id that git has for it, and where its content is."""

    oid: str
    size: int
    sha256: str
    lfs: bool
    xet_hash: str | None = None

    @property
    def pointer_size(self) -> int:
        """Size in bytes of what git keeps in place of an LFS file."""
        return len(lfs_pointer(self.sha256, self.size))


@dataclass(frozen=True)
class Commit:
    """One visible state of a repository; ``tree`` is every file by its path, in order of paths."""

    id: str
    parent: str | None
    title: str
    message: str
    date: str
    author: str
    tree: Mapping[str, Entry] = field(repr=False)


@dataclass(frozen=True)
class State:
    """What changes about a repository; references are names to commit ids."""

    private: bool
    created: str
    branches: Mapping[str, str]
    tags: Mapping[str, str]


def now() -> str:
    """The time as the Hub writes it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class Repository:
    """A repository of one folder; whoever changes it holds ``lock``."""

    def __init__(self, folder: Path, repo_type: str, repo_id: str) -> None:
        self.folder = folder
        self.repo_type = repo_type
        self.repo_id = repo_id
        self.lfs = ObjectStore(folder / "lfs")
        self.regular = ObjectStore(folder / "regular")
        self.lock = threading.RLock()

    @property
    def state(self) -> State:
        """Visibility and references, as they are now."""
        return State(**json.loads((self.folder / "repository.json").read_bytes()))

    def save(self, state: State) -> None:
        """Make ``state`` what everybody sees."""
        write_whole(self.folder / "repository.json", json.dumps(asdict(state), indent=2).encode())

    def remove(self) -> None:
        """Delete the repository with all that it holds."""
        (self.folder / "repository.json").unlink()
        shutil.rmtree(self.folder)

    def commit_of(self, revision: str) -> Commit | None:
        """The commit of a branch, a tag or an id; None where there is no such thing."""
        state = self.state
        name = revision.removeprefix("refs/heads/").removeprefix("refs/tags/")
        found = state.branches.get(name) or state.tags.get(name) or revision
        file = self.folder / "commits" / f"{found}.json"
        return _read_commit(file) if "/" not in found and file.is_file() else None

    def history(self, commit: Commit | None) -> Iterator[Commit]:
        """The commit and those before it, newest first."""
        while commit is not None:
            yield commit
            commit = self.commit_of(commit.parent) if commit.parent else None

    def content(self, entry: Entry) -> Path:
        """The file that holds the entry's bytes."""
        return (self.lfs if entry.lfs else self.regular).path(entry.sha256)

    def add_commit(
        self, branch: str, tree: Mapping[str, Entry], *, title: str, message: str = "", author: str = ""
    ) -> Commit:
        """Write a commit of ``tree`` on top of ``branch``, then move the branch to it."""
        with self.lock:
            state = self.state
            ordered = dict(sorted(tree.items()))
            draft = Commit("", state.branches.get(branch), title, message, now(), author, ordered)
            content = json.dumps(asdict(draft), sort_keys=True).encode()
            commit = replace(draft, id=hashlib.sha1(content).hexdigest())
            write_whole(self.folder / "commits" / f"{commit.id}.json", json.dumps(asdict(commit)).encode())
            self.save(replace(state, branches={**state.branches, branch: commit.id}))
            return commit


@lru_cache(maxsize=256)
def _read_commit(file: Path) -> Commit:
    # A commit's id is the hash of what it says, so what was read once holds.
    values = json.loads(file.read_bytes())
    tree = {path: Entry(**entry) for path, entry in values.pop("tree").items()}
    return Commit(**values, tree=tree)
