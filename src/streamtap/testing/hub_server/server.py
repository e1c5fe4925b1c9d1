"""``HubServer``: a local Hub that the real client talks to."""

from __future__ import annotations

import re
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from streamtap.errors import InvalidInput
from streamtap.testing.hub_server.building import new_hub
from streamtap.testing.hub_server.faults import Fault, Faults
from streamtap.testing.hub_server.repositories import PLURALS, valid_id
from streamtap.testing.hub_server.repository import MAIN, Commit, Repository
from streamtap.testing.hub_server.seeding import commit_folder
from streamtap.testing.hub_server.watching import HubRequest, Watch

if TYPE_CHECKING:
    from streamtap.testing.hub_server.running import Running

_COMMIT = re.compile(r"^POST /api/[^/]+/[^/]+/[^/]+/commit/")


class HubServer:
    """A Hub of models, datasets and spaces on 127.0.0.1, for tests and for trying things out.

    ::

        with HubServer(tmp_path / "hub") as hub, online_client(hub):
            api = HfApi(endpoint=hub.endpoint, token=hub.token)
            api.create_repo("tester/things", repo_type="dataset")

    ``huggingface_hub`` and ``datasets`` read their settings when they are imported. A process that is started for it
    gets ``hub.environment``; in a running one, :func:`online_client` changes what the libraries have read.

    What is in the repositories stays in ``folder``, and a server that is started there again has it all; one server at
    a time uses a folder. Requests, faults and signed links are of one run. There are no pull requests, gated
    repositories, rate limits or ignored files, and what a card's metadata says is not checked. Whoever has ``token``
    may write into every namespace.

    Args:
        folder: where repositories are kept; made when it is not there.
        token: who sends it may read and write everything.
        read_token: who sends it may read everything.
        user: the name of whoever has the token.
        xet: serve Xet also, by folders below ``folder``, so for clients on this machine; what is committed from there
            can be read in either way. Without it, a client that has ``hf_xet`` must set ``HF_HUB_DISABLE_XET=1``.
        port: where to listen; 0 takes a free port. Large files are served from a second, free port, for the client
            looks for another origin.
        page_size: most entries on one page of a tree.
        chunk_bytes: LFS objects that are larger are uploaded in parts of this size.
        link_seconds: how long a signed link to a large file is valid.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        token: str = "hf_test",
        read_token: str = "hf_read",
        user: str = "tester",
        xet: bool = False,
        port: int = 0,
        page_size: int = 1000,
        chunk_bytes: int = 5_000_000,
        link_seconds: float = 3600,
    ) -> None:
        self.folder = Path(folder).absolute()
        self.token = token
        self.user = user
        self._port = port
        self._watch = Watch()
        self._faults = Faults()
        self._running: Running | None = None
        self._hub = new_hub(
            self.folder,
            tokens={token: "write", read_token: "read"},
            user=user,
            xet=xet,
            page_size=page_size,
            chunk_bytes=chunk_bytes,
            link_seconds=link_seconds,
        )

    def start(self) -> Self:
        """Listen; ``endpoint`` and ``cdn`` are known afterwards.

        Raises:
            InvalidInput: the port cannot be used.
        """
        from streamtap.testing.hub_server.app import build
        from streamtap.testing.hub_server.running import address, listen, run

        if self._running is None:
            sockets = [listen(self._port), listen(0)]
            self._hub.endpoint, self._hub.cdn = map(address, sockets)
            # Large files must come from another place, and older clients tell places by their host names alone.
            self._hub.cdn = self._hub.cdn.replace("127.0.0.1", "localhost")
            self._running = run(build(self._hub, self._faults, self._watch), sockets)
        return self

    def stop(self) -> None:
        """Close the connections and the ports; nothing happens to one that does not run."""
        running, self._running = self._running, None
        if running is not None:
            running.stop()

    def __enter__(self) -> Self:
        """Start."""
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop."""
        self.stop()

    @property
    def endpoint(self) -> str:
        """The address that a client is given."""
        return self._hub.endpoint

    @property
    def cdn(self) -> str:
        """The other origin, where large files come from and go to."""
        return self._hub.cdn

    @property
    def xet(self) -> bool:
        """Whether uploads by Xet are taken."""
        return self._hub.xet is not None

    @property
    def environment(self) -> dict[str, str]:
        """What a process must have in its environment before it imports the client."""
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_TOKEN": self.token,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "0" if self.xet else "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_UPDATE_CHECK": "1",
        }

    # What passed.

    @property
    def requests(self) -> list[HubRequest]:
        """Requests since the start or the last :meth:`reset_counts`, in the order in which they came."""
        return self._watch.requests()

    def bytes_out(self, path_contains: str = "") -> int:
        """Bytes of the answers' bodies, of paths with that text; a large file's path ends with its name."""
        return sum(request.bytes_out for request in self.requests if path_contains in request.path)

    def bytes_in(self, path_contains: str = "") -> int:
        """Bytes of the requests' bodies, of paths with that text; an upload's path ends with its SHA-256."""
        return sum(request.bytes_in for request in self.requests if path_contains in request.path)

    def reset_counts(self) -> None:
        """Forget the requests, and how often objects were sent."""
        self._watch.reset()
        self._hub.sent.clear()

    # What goes wrong.

    def fail(self, match: str, *, status: int = 500, times: int = 1, retry_after: int | None = None) -> Fault:
        """Answer the next ``times`` requests whose ``METHOD /path`` the regular expression finds with ``status``.

        Paths are decoded and without their query. ``retry_after`` is sent as ``Retry-After``, in whole seconds; the
        client waits one more.
        """
        return self._faults.add(Fault("fail", _pattern(match), times, status=status, retry_after=retry_after))

    def cut(self, match: str, *, after_bytes: int, times: int = 1) -> Fault:
        """Close the connection once ``after_bytes`` of a body have passed.

        The body is the request's of a PUT or POST, and the answer's otherwise, where it is a good one of more bytes.
        """
        return self._faults.add(Fault("cut", _pattern(match), times, after_bytes=after_bytes))

    def lose_answer(self, match: str, *, times: int = 1) -> Fault:
        """Do what the next ``times`` requests ask for, then close the connection instead of answering."""
        return self._faults.add(Fault("lose", _pattern(match), times))

    def corrupt(self, match: str, *, times: int = 1) -> Fault:
        """Change the byte in the middle of the next ``times`` good answers that have a body."""
        return self._faults.add(Fault("corrupt", _pattern(match), times))

    def stale_parent(self, *, times: int = 1) -> Fault:
        """Refuse commits as if another had been made since: 412."""
        return self._faults.add(Fault("fail", _COMMIT, times, status=412))

    def clear_faults(self) -> None:
        """Let nothing go wrong any more."""
        self._faults.clear()

    # What is there.

    def add(
        self,
        repo_id: str,
        folder: Path | str,
        *,
        repo_type: str = "dataset",
        private: bool = False,
        message: str = "add a folder",
    ) -> Commit:
        """Commit all files of a local folder, in a repository that is made when it is not there.

        Raises:
            InvalidInput: no such folder, or not a name for a repository.
        """
        repositories = self._hub.repositories
        if not valid_id(repo_id) or repo_type not in PLURALS:
            raise InvalidInput(
                f"expected namespace/name and one of {', '.join(PLURALS)}; got {repo_id!r}, {repo_type!r}."
            )
        repository = repositories.find(repo_type, repo_id)
        if repository is None:
            repository = repositories.create(repo_type, repo_id, private=private, author=self.user)
        return commit_folder(repository, Path(folder), title=message, author=self.user)

    def files(self, repo_id: str, repo_type: str = "dataset", revision: str = MAIN) -> dict[str, int]:
        """Size in bytes of every file, by its path."""
        return {path: entry.size for path, entry in self._commit(repo_id, repo_type, revision).tree.items()}

    def read(self, repo_id: str, path: str, repo_type: str = "dataset", revision: str = MAIN) -> bytes:
        """The bytes of a file.

        Raises:
            InvalidInput: there is no such repository, revision or file.
        """
        tree = self._commit(repo_id, repo_type, revision).tree
        if path not in tree:
            raise InvalidInput(f"{repo_id} has no {path!r} at {revision}; it has {', '.join(tree)}.")
        return self._repository(repo_id, repo_type).content(tree[path]).read_bytes()

    def commits(self, repo_id: str, repo_type: str = "dataset", revision: str = MAIN) -> list[Commit]:
        """The commits of a revision, newest first."""
        commit = self._commit(repo_id, repo_type, revision)
        return list(self._repository(repo_id, repo_type).history(commit))

    def objects(self) -> dict[str, int]:
        """SHA-256 of every LFS object that is kept, and how often it was sent since the start or the last reset.

        What comes by Xet is known, and counted, when it is committed.
        """
        kept = {oid for kind in PLURALS for each in self._hub.repositories.every(kind) for oid in each.lfs.names()}
        sent = dict(self._hub.sent)
        return {oid: sent.get(oid, 0) for oid in sorted(kept)}

    def _repository(self, repo_id: str, repo_type: str) -> Repository:
        repository = self._hub.repositories.find(repo_type, repo_id)
        if repository is None:
            raise InvalidInput(f"there is no {repo_type} {repo_id!r} on this Hub.")
        return repository

    def _commit(self, repo_id: str, repo_type: str, revision: str) -> Commit:
        commit = self._repository(repo_id, repo_type).commit_of(revision)
        if commit is None:
            raise InvalidInput(f"{repo_id} has no revision {revision!r}.")
        return commit


def _pattern(match: str) -> re.Pattern[str]:
    try:
        return re.compile(match)
    except re.error as error:
        raise InvalidInput(f"match must be a regular expression; got {match!r} ({error}).") from error
