"""All repositories of one folder."""

from __future__ import annotations

import re
import threading
from pathlib import Path

from streamtap.testing.hub_server.attributes import GITATTRIBUTES
from streamtap.testing.hub_server.objects import git_oid
from streamtap.testing.hub_server.repository import MAIN, Entry, Repository, State, now

#: The kinds of repositories, and how each is called in an address.
PLURALS = {"model": "models", "dataset": "datasets", "space": "spaces"}

_NAME = re.compile(r"[A-Za-z0-9_](?:[\w.-]{0,94}[\w])?", re.ASCII)


class Repositories:
    """Repositories by their kind and id, found again when the folder is opened again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.RLock()
        self._opened: dict[Path, Repository] = {}

    def find(self, repo_type: str, repo_id: str) -> Repository | None:
        """The repository, or None."""
        if repo_type not in PLURALS or not valid_id(repo_id):
            return None
        folder = self._folder(repo_type, repo_id)
        with self._lock:
            if not (folder / "repository.json").is_file():
                self._opened.pop(folder, None)
                return None
            return self._opened.setdefault(folder, Repository(folder, repo_type, repo_id))

    def create(self, repo_type: str, repo_id: str, *, private: bool, author: str) -> Repository:
        """A new repository with its first commit; there must be none of that name."""
        folder = self._folder(repo_type, repo_id)
        with self._lock:
            new = self._opened[folder] = Repository(folder, repo_type, repo_id)
            content = GITATTRIBUTES.encode()
            entry = Entry(git_oid(content), len(content), new.regular.put(content), lfs=False)
            new.save(State(private, now(), branches={}, tags={}))
            new.add_commit(MAIN, {".gitattributes": entry}, title="initial commit", author=author)
            return new

    def delete(self, repository: Repository) -> None:
        """Remove the repository and all it holds."""
        with self._lock, repository.lock:
            self._opened.pop(repository.folder, None)
            repository.remove()

    def move(self, repository: Repository, repo_id: str) -> None:
        """Give the repository another id, which must be free."""
        with self._lock, repository.lock:
            self._opened.pop(repository.folder, None)
            target = self._folder(repository.repo_type, repo_id)
            target.parent.mkdir(parents=True, exist_ok=True)
            repository.folder.rename(target)

    def every(self, repo_type: str) -> list[Repository]:
        """All repositories of a kind, in order of their ids."""
        files = sorted((self.folder / PLURALS[repo_type]).glob("*/*/repository.json"))
        ids = [f"{file.parent.parent.name}/{file.parent.name}" for file in files]
        return [found for repo_id in ids if (found := self.find(repo_type, repo_id))]

    def _folder(self, repo_type: str, repo_id: str) -> Path:
        return self.folder / PLURALS[repo_type] / repo_id


def valid_id(repo_id: str) -> bool:
    """Whether ``repo_id`` is a namespace and a name that the Hub allows, and so safe as a folder."""
    parts = repo_id.split("/")
    return len(parts) == 2 and all(_NAME.fullmatch(part) and ".." not in part and "--" not in part for part in parts)
