"""Who somebody is, and repositories as a whole: making, changing, describing, removing them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from streamtap.testing.hub_server.repositories import PLURALS, valid_id
from streamtap.testing.hub_server.repository import Commit, Entry, Repository
from streamtap.testing.hub_server.shared import (
    KINDS,
    commit_at,
    hub_of,
    json_body,
    must_write,
    open_to_read,
    page_of,
    param,
    reading,
    refusal,
    role_of,
    writing,
)


async def front_page(request: Request) -> Response:
    """``GET /``."""
    return PlainTextResponse("A local Hub for tests and trials, by Streamtap.\n")


async def whoami(request: Request) -> Response:
    """``GET /api/whoami-v2``."""
    role = role_of(request)
    if role is None:
        raise refusal(401, "Invalid username or password.")
    user = hub_of(request).user
    token = {"displayName": role, "role": role, "createdAt": "2020-01-01T00:00:00.000Z"}
    about = {"type": "user", "id": user, "name": user, "fullname": user, "isPro": False, "orgs": []}
    return JSONResponse(about | {"auth": {"type": "access_token", "accessToken": token}})


async def create(request: Request) -> Response:
    """``POST /api/repos/create``; every namespace is open to whoever may write."""
    must_write(request)
    body, hub = await json_body(request), hub_of(request)
    repo_type, repo_id = _named(body, hub.user)
    if not valid_id(repo_id) or repo_type not in PLURALS:
        raise refusal(400, f"{repo_id!r} is no name for a repository of type {repo_type!r}")
    there = hub.repositories.find(repo_type, repo_id)
    private = body.get("visibility") == "private" or body.get("private") is True
    repository = there or hub.repositories.create(repo_type, repo_id, private=private, author=hub.user)
    about = {"url": f"{hub.endpoint}/{page_of(repository)}", "name": repo_id, "id": repo_id}
    if there:
        message = f"You already created this {repo_type} repo: {repo_id}"
        return JSONResponse(about | {"error": message}, 409, headers={"X-Error-Message": message})
    return JSONResponse(about)


async def delete(request: Request) -> Response:
    """``DELETE /api/repos/delete``."""
    repo_type, repo_id = _named(await json_body(request), hub_of(request).user)
    repository = open_to_read(request, repo_type, repo_id)
    must_write(request)
    hub_of(request).repositories.delete(repository)
    return PlainTextResponse("OK")


async def move(request: Request) -> Response:
    """``POST /api/repos/move``; the old id is free afterwards and leads nowhere."""
    body, repositories = await json_body(request), hub_of(request).repositories
    repo_type, target = body.get("type", "model"), str(body.get("toRepo"))
    repository = open_to_read(request, repo_type, str(body.get("fromRepo")))
    must_write(request)
    if not valid_id(target) or repositories.find(repo_type, target):
        raise refusal(409 if valid_id(target) else 400, f"{target!r} is taken or is no name for a repository")
    repositories.move(repository, target)
    return PlainTextResponse("OK")


async def settings(request: Request) -> Response:
    """``PUT /api/{repository}/settings``: who sees it; the rest is taken and forgotten."""
    repository, body = writing(request), await json_body(request)
    private = {"private": True, "public": False}.get(body.get("visibility", ""), body.get("private"))
    with repository.lock:
        if private is not None:
            repository.save(replace(repository.state, private=bool(private)))
    return JSONResponse({"private": repository.state.private})


async def info(request: Request) -> Response:
    """``GET /api/{repository}`` and ``…/revision/{revision}``."""
    repository = reading(request)
    commit = commit_at(request, repository)
    blobs = request.query_params.get("blobs", "").lower() in ("true", "1")
    siblings = [_sibling(path, entry, blobs) for path, entry in commit.tree.items()]
    headers = {"X-Repo-Commit": commit.id}
    return JSONResponse(_about(repository, commit) | {"siblings": siblings}, headers=headers)


async def every(request: Request) -> Response:
    """``GET /api/datasets`` and the like: those that the asker may see, by ``author`` and ``search``."""
    kind, role = KINDS.get(param(request, "kind"), ""), role_of(request)
    if not kind:
        raise refusal(404, "there is no such list")
    author, search = request.query_params.get("author"), request.query_params.get("search", "").lower()
    found = [
        _about(repository, commit)
        for repository in hub_of(request).repositories.every(kind)
        if (role or not repository.state.private)
        and author in (None, repository.repo_id.split("/")[0])
        and search in repository.repo_id.lower()
        and (commit := repository.commit_of("main"))
    ]
    return JSONResponse(found)


def _named(body: dict[str, Any], user: str) -> tuple[str, str]:
    return body.get("type") or "model", f"{body.get('organization') or user}/{body.get('name') or ''}"


def _about(repository: Repository, commit: Commit) -> dict[str, Any]:
    state, repo_id = repository.state, repository.repo_id
    about = {
        "_id": commit.id[:24],
        "id": repo_id,
        "author": repo_id.split("/")[0],
        "sha": commit.id,
        "lastModified": commit.date,
        "createdAt": state.created,
        "private": state.private,
        "gated": False,
        "disabled": False,
        "tags": [],
        "downloads": 0,
        "likes": 0,
        "usedStorage": sum(entry.size for entry in commit.tree.values()),
    }
    return about | ({"modelId": repo_id} if repository.repo_type == "model" else {})


def _sibling(path: str, entry: Entry, blobs: bool) -> dict[str, Any]:
    about: dict[str, Any] = {"rfilename": path}
    if blobs:
        about |= {"blobId": entry.oid, "size": entry.size}
    if blobs and entry.lfs:
        about["lfs"] = {"sha256": entry.sha256, "size": entry.size, "pointerSize": entry.pointer_size}
    return about


ROUTES = [
    Route("/", front_page),
    Route("/api/whoami-v2", whoami),
    Route("/api/repos/create", create, methods=["POST"]),
    Route("/api/repos/delete", delete, methods=["DELETE"]),
    Route("/api/repos/move", move, methods=["POST"]),
    Route("/api/{kind}", every),
    Route("/api/{kind}/{namespace}/{name}", info),
    Route("/api/{kind}/{namespace}/{name}/revision/{rev}", info),
    Route("/api/{kind}/{namespace}/{name}/settings", settings, methods=["PUT"]),
]
