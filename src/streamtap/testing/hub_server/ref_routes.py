"""Branches, tags and the list of commits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from streamtap.testing.hub_server.repository import MAIN, Commit, Repository
from streamtap.testing.hub_server.shared import commit_at, json_body, param, reading, refusal, writing

_Kind = Literal["branches", "tags"]


async def refs(request: Request) -> Response:
    """``GET /api/{repository}/refs``."""
    state = reading(request).state
    branches = [_ref("heads", name, commit) for name, commit in sorted(state.branches.items())]
    tags = [_ref("tags", name, commit) for name, commit in sorted(state.tags.items())]
    return JSONResponse({"branches": branches, "tags": tags, "converts": [], "pullRequests": []})


async def commits(request: Request) -> Response:
    """``GET /api/{repository}/commits/{revision}``, newest first, all on one page."""
    repository = reading(request)
    return JSONResponse(
        [
            {
                "id": commit.id,
                "title": commit.title,
                "message": commit.message,
                "date": commit.date,
                "authors": [{"user": commit.author}],
                "formatted": {"title": commit.title, "message": commit.message},
            }
            for commit in repository.history(commit_at(request, repository))
        ]
    )


async def create_branch(request: Request) -> Response:
    """``POST /api/{repository}/branch/{name}``."""
    repository, name = writing(request), param(request, "ref")
    start = (await json_body(request)).get("startingPoint") or MAIN
    commit = repository.commit_of(start)
    if commit is None:
        raise refusal(404, f"Invalid rev id: {start}", "RevisionNotFound")
    return _create(repository, "branches", name, commit)


async def delete_branch(request: Request) -> Response:
    """``DELETE /api/{repository}/branch/{name}``."""
    repository, name = writing(request), param(request, "ref")
    if name == MAIN:
        raise refusal(403, f"the branch {name} cannot be deleted")
    return _delete(repository, "branches", name)


async def create_tag(request: Request) -> Response:
    """``POST /api/{repository}/tag/{revision}``."""
    repository = writing(request)
    commit, name = commit_at(request, repository, "ref"), (await json_body(request)).get("tag")
    if not isinstance(name, str) or not name:
        raise refusal(400, "a tag must have a name")
    return _create(repository, "tags", name, commit)


async def delete_tag(request: Request) -> Response:
    """``DELETE /api/{repository}/tag/{name}``."""
    return _delete(writing(request), "tags", param(request, "ref"))


def _create(repository: Repository, kind: _Kind, name: str, commit: Commit) -> Response:
    with repository.lock:
        held = _held(repository, kind)
        if name in held:
            raise refusal(409, f"{name} is among the {kind} already")
        _save(repository, kind, {**held, name: commit.id})
    return PlainTextResponse("OK")


def _delete(repository: Repository, kind: _Kind, name: str) -> Response:
    with repository.lock:
        held = _held(repository, kind)
        if name not in held:
            raise refusal(404, f"{name} is not among the {kind}", "RevisionNotFound")
        _save(repository, kind, {k: v for k, v in held.items() if k != name})
    return PlainTextResponse("OK")


def _held(repository: Repository, kind: _Kind) -> Mapping[str, str]:
    return repository.state.branches if kind == "branches" else repository.state.tags


def _save(repository: Repository, kind: _Kind, names: Mapping[str, str]) -> None:
    changes: Any = {kind: names}
    repository.save(replace(repository.state, **changes))


def _ref(kind: str, name: str, commit_id: str) -> dict[str, str]:
    return {"name": name, "ref": f"refs/{kind}/{name}", "targetCommit": commit_id}


ROUTES = [
    Route("/api/{kind}/{namespace}/{name}/refs", refs),
    Route("/api/{kind}/{namespace}/{name}/commits/{rev}", commits),
    Route("/api/{kind}/{namespace}/{name}/branch/{ref}", create_branch, methods=["POST"]),
    Route("/api/{kind}/{namespace}/{name}/branch/{ref}", delete_branch, methods=["DELETE"]),
    Route("/api/{kind}/{namespace}/{name}/tag/{ref}", create_tag, methods=["POST"]),
    Route("/api/{kind}/{namespace}/{name}/tag/{ref}", delete_tag, methods=["DELETE"]),
]
