"""A dataset on the Hugging Face Hub, to be published to: large files first, then all in one commit."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from streamtap.dataset import names
from streamtap.dataset.hub import HubSource
from streamtap.dataset.hub_calls import PATIENCE_SECONDS, HubCalls, quiet_bars
from streamtap.dataset.hub_commit import HubCommit
from streamtap.dataset.hub_head import Head, look_at
from streamtap.dataset.hub_secrets import token_that_is_sent
from streamtap.dataset.outgoing import Outgoing
from streamtap.dataset.places import Advance, Found, no_advance
from streamtap.errors import AccessDenied, DatasetExists, InvalidInput, TransferFailed
from streamtap.settings import Settings

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd


class HubTarget:
    """One dataset repository, which is made at the first ``put`` if it is not there.

    ``private`` is the visibility of a new one, by default what the Hub takes for this user; an existing one must
    have it. ``token`` is by default the one in ``HF_TOKEN`` or of ``hf auth login``; ``patience_seconds``
    is how long to wait for a server that fails or asks to wait.

    Raises:
        MissingExtra: huggingface_hub is not installed.
        InvalidInput: a name, token or address that the Hub cannot have.
    """

    def __init__(
        self,
        repo_id: str,
        private: bool | None = None,
        token: str | bool | None = None,
        endpoint: str | None = None,
        settings: Settings | None = None,
        *,
        patience_seconds: float = PATIENCE_SECONDS,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._settings = settings or Settings.from_environment()
        self._patience_seconds, self._sleep = patience_seconds, sleep
        self._calls = HubCalls(repo_id, token, endpoint, self._settings, patience_seconds=patience_seconds, sleep=sleep)
        if "/" not in repo_id:
            raise InvalidInput(f"name the user or organisation to publish under, as in 'user/{repo_id}'.")
        self._private = private
        self._outgoing = Outgoing(self._settings.datasets_dir / "outgoing")
        self._lock = Lock()
        self._head: Head | None = None
        self._was_absent = False
        self._additions: dict[str, CommitOperationAdd] = {}

    def __repr__(self) -> str:
        return f"HubTarget({self.name!r})"

    @property
    def name(self) -> str:
        """``user/name``."""
        return self._calls.repo_id

    @property
    def is_local(self) -> bool:
        """It is not."""
        return False

    @property
    def url(self) -> str:
        """The address that a person opens."""
        return f"{self._calls.endpoint}/datasets/{self.name}"

    def look(self) -> Found | None:
        """What is there, None if nothing exists under that name; writes nothing there.

        Raises:
            InvalidInput: visibility that differs from the one asked for.
            TransferFailed: the server failed for too long, or (``AccessDenied``) refuses us.
        """
        self._outgoing.sweep()
        with self._lock:
            self._head = self._examined()
            self._was_absent = self._head is None
            head = self._head
        if head is None:
            return None
        files = {path: file.size_bytes for path, file in head.files.items()}
        sums = {path: file.sha256 for path, file in head.files.items() if file.sha256 is not None}
        return Found(files, sums=sums)

    def source(self) -> HubSource:
        """The same repository, to be read as it is on the Hub at the first use of what is returned."""
        return HubSource(
            self.name,
            token=self._calls.token,
            endpoint=self._calls.endpoint,
            refresh=True,
            settings=self._settings,
            patience_seconds=self._patience_seconds,
            sleep=self._sleep,
        )

    def room(self, path: str) -> Path:
        """Where to write the file that will be ``path``; its folder exists."""
        return self._outgoing.room(_checked_path(path))

    def put(self, path: str, file: Path, *, advance: Advance = no_advance) -> None:
        """Send a finished file, which was written to ``room(path)``; it is gone from there afterwards, if it was large.

        May be called from several threads.

        Raises:
            InvalidInput: a path that is none of the format, or that the repository's ``.gitignore`` keeps out.
            DatasetExists: somebody else made a dataset of that name in the meantime.
            TransferFailed: the server failed for too long, or (``AccessDenied``) refuses us.
        """
        self._ready()
        addition = self._sent(_checked_path(path), file)
        size_bytes = addition.upload_info.size
        if addition.path_or_fileobj == b"":
            # Small files, which the server wants in the commit itself, are still needed.
            file.unlink()
        with self._lock:
            self._additions[path] = addition
        advance(size_bytes)

    def publish(self, files: Mapping[str, Path], stale: Sequence[str], message: str) -> str:
        """Make all that was put, and these last small files, the dataset, in one commit; remove ``stale`` paths in it.

        Where all of it is there already, there is no commit. Returns the address that a person opens.

        Raises:
            TransferFailed: the server failed for too long; nothing became visible.
            DatasetExists: somebody else published there in the meantime.
        """
        head = self._ready()
        last = {path: self._sent(_checked_path(path), file) for path, file in files.items()}
        with self._lock:
            additions = [*({**self._additions, **last}).values()]
        with quiet_bars():
            commit = HubCommit(self._calls, head, additions, stale, message).make()
        if commit is not None:
            # Whoever loads it here next must not find what was there before.
            self.source().moved_to(commit)
        with self._lock:
            # What was seen is no longer what is there.
            self._head, self._was_absent = None, False
            self._additions.clear()
        return self.url

    def close(self) -> None:
        """Remove what was left on this machine; what was sent stays, so that the next push need not send it."""
        self._outgoing.close()

    def _examined(self) -> Head | None:
        head = look_at(self._calls)
        if head is None and token_that_is_sent(self._calls.token) is None:
            raise AccessDenied(
                f"publishing to {self.name} needs a token that may write: pass token=, set HF_TOKEN or "
                "run `hf auth login`."
            )
        if head is not None and self._private not in (None, head.private) and head.private is not None:
            there, asked = ("private", False) if head.private else ("public", True)
            raise InvalidInput(
                f"{self.name} is {there} and private={asked} was asked for; nothing was sent. Change it at "
                f"{self.url}/settings, or publish with private={head.private}."
            )
        return head

    def _ready(self) -> Head:
        """The repository as it was seen, made where it was not there."""
        with self._lock:
            if self._head is None:
                self._head = (None if self._was_absent else self._examined()) or self._made()
            return self._head

    def _made(self) -> Head:
        def create() -> None:
            # One that exists is no error here: the answer to an earlier try may have been lost.
            calls.api.create_repo(calls.repo_id, repo_type="dataset", private=self._private, exist_ok=True)

        calls = self._calls
        calls.call(f"creating {self.name}", create)
        head = self._examined()
        if head is None:
            raise TransferFailed(f"{self.name} was created, but the Hub does not show it; run it again.")
        if head.ours():
            raise DatasetExists(
                f"somebody else made the dataset {self.name} in the meantime; look at it, and run it again to "
                "replace it."
            )
        return head

    def _sent(self, path: str, file: Path) -> CommitOperationAdd:
        """The file as a part of the commit to come; if it is a large one, its bytes are on the server."""
        from huggingface_hub import CommitOperationAdd

        addition = CommitOperationAdd(path, str(file))

        def send() -> None:
            self._calls.api.preupload_lfs_files(self.name, [addition], repo_type="dataset")

        with quiet_bars():
            self._calls.call(f"sending {path} to {self.name}", send)
        # The client would leave it out of the commit without a word.
        if getattr(addition, "_should_ignore", False):
            raise InvalidInput(f"the .gitignore of {self.name} keeps {path} out; remove that line from it.")
        return addition


def _checked_path(path: str) -> str:
    if not names.is_ours(path) or any(part in ("", ".", "..") for part in path.split("/")):
        raise InvalidInput(f"{path!r} is no file of the format: expected a card, index/… or tensors/….")
    return path
