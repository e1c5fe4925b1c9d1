"""What the handlers of one server share, and how they answer when they refuse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from starlette.exceptions import HTTPException
from starlette.requests import Request

from streamtap.testing.hub_server.repositories import PLURALS, Repositories
from streamtap.testing.hub_server.repository import Commit, Repository
from streamtap.testing.hub_server.signing import Signer
from streamtap.testing.hub_server.xet_store import XetStore

KINDS = {plural: kind for kind, plural in PLURALS.items()}


@dataclass
class Hub:
    """State and settings of a server: roles by their tokens, and addresses, which are known once it listens."""

    repositories: Repositories
    signer: Signer
    tokens: Mapping[str, str]
    user: str
    page_size: int
    chunk_bytes: int
    xet: XetStore | None
    endpoint: str = ""
    cdn: str = ""
    sent: Counter[str] = field(default_factory=Counter)


def hub_of(request: Request) -> Hub:
    """The server that answers the request."""
    hub: Hub = request.app.state.hub
    return hub


def param(request: Request, name: str) -> str:
    """A part of the path, decoded: paths are matched as they were sent, for a revision may hold ``%2F``."""
    return unquote(request.path_params.get(name, ""))


def refusal(status: int, message: str, code: str = "", **headers: str) -> HTTPException:
    """An answer that the client turns into an error; ``code`` is what it tells errors apart by."""
    about = {"X-Error-Message": " ".join(message.encode("ascii", "replace").decode().split()), **headers}
    return HTTPException(status, message, headers=about | ({"X-Error-Code": code} if code else {}))


def role_of(request: Request) -> str | None:
    """``write``, ``read``, or None for somebody unknown; a token that is not ours is refused."""
    given = request.headers.get("authorization", "")
    if not given:
        return None
    role = hub_of(request).tokens.get(given.removeprefix("Bearer "))
    if role is None:
        raise refusal(401, "Invalid credentials in Authorization header")
    return role


def must_write(request: Request) -> None:
    """Refuse whoever may not change anything."""
    role = role_of(request)
    if role is None:
        raise _unknown_repository(role)
    if role != "write":
        raise refusal(403, "this token may only read")


def reading(request: Request) -> Repository:
    """The repository that the path names, for somebody who may read it."""
    return open_to_read(request, KINDS.get(param(request, "kind") or "models", ""), _repo_id(request))


def writing(request: Request) -> Repository:
    """The repository that the path names, for somebody who may change it."""
    repository = reading(request)
    must_write(request)
    return repository


def open_to_read(request: Request, repo_type: str, repo_id: str) -> Repository:
    """A repository for somebody who may read it; a private one does not exist for others."""
    role = role_of(request)
    repository = hub_of(request).repositories.find(repo_type, repo_id)
    if repository is None or (repository.state.private and role is None):
        raise _unknown_repository(role)
    return repository


def commit_at(request: Request, repository: Repository, name: str = "rev") -> Commit:
    """The commit of the revision in the path, by default of ``main``."""
    revision = param(request, name) or "main"
    commit = repository.commit_of(revision)
    if commit is None:
        raise refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")
    return commit


def no_entry(path: str, commit: Commit) -> HTTPException:
    """The answer to a path that the commit does not hold."""
    return refusal(404, f"{path} does not exist at {commit.id}", "EntryNotFound", **{"X-Repo-Commit": commit.id})


def page_of(repository: Repository) -> str:
    """The path of a repository's page, without the leading slash."""
    prefix = {"dataset": "datasets/", "space": "spaces/"}.get(repository.repo_type, "")
    return prefix + repository.repo_id


async def json_body(request: Request) -> dict[str, Any]:
    """The request's body, which must be a JSON object."""
    try:
        body = await request.json()
    except ValueError as error:
        raise refusal(400, "the body must be JSON") from error
    if not isinstance(body, dict):
        raise refusal(400, "the body must be a JSON object")
    return body


def _repo_id(request: Request) -> str:
    return f"{param(request, 'namespace')}/{param(request, 'name')}"


def _unknown_repository(role: str | None) -> HTTPException:
    # The code is always sent: without it the client reads a 401 as this only over https.
    if role is None:
        return refusal(401, "Invalid username or password.", "RepoNotFound")
    return refusal(404, "Repository not found", "RepoNotFound")
