"""What a revision holds: its tree in pages, and the files and folders that a client names."""

from __future__ import annotations

from urllib.parse import parse_qs, urlencode

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from streamtap.testing.hub_server.listing import Item, add_last_commits, listed, named
from streamtap.testing.hub_server.repository import Commit, Repository
from streamtap.testing.hub_server.shared import commit_at, hub_of, no_entry, param, reading

#: The Hub's pages are shorter where it has to look for commits.
MOST_EXPANDED = 50


async def tree(request: Request) -> Response:
    """``GET /api/{repository}/tree/{revision}/{folder}?recursive=&expand=``, a page at a time."""
    repository = reading(request)
    commit = commit_at(request, repository)
    folder = param(request, "path").strip("/")
    items = listed(commit.tree, folder, recursive=_is_true(request, "recursive"))
    if items is None:
        raise no_entry(folder, commit)
    items = [item for item in items if item["path"] > request.query_params.get("cursor", "")]
    expand, limit = _is_true(request, "expand"), hub_of(request).page_size
    limit = min(limit, MOST_EXPANDED) if expand else limit
    page, rest = items[:limit], items[limit:]
    headers = {"X-Repo-Commit": commit.id} | ({"Link": _next(request, page[-1]["path"])} if rest else {})
    return JSONResponse(_told(request, page, repository, commit, expand), headers=headers)


async def paths_info(request: Request) -> Response:
    """``POST /api/{repository}/paths-info/{revision}``, with a form or JSON."""
    repository = reading(request)
    commit = commit_at(request, repository)
    if "json" in request.headers.get("content-type", ""):
        body = await request.json()
        paths, expand = body.get("paths", []), bool(body.get("expand"))
    else:
        form = parse_qs((await request.body()).decode())
        paths, expand = form.get("paths", []), form.get("expand", [""])[0].lower() in ("true", "1")
    items = named(commit.tree, [paths] if isinstance(paths, str) else paths)
    return JSONResponse(_told(request, items, repository, commit, expand))


def _told(request: Request, items: list[Item], repository: Repository, commit: Commit, expand: bool) -> list[Item]:
    """The items with what the client asked for, and without what this server cannot serve."""
    if expand:
        add_last_commits(items, repository, commit)
    if hub_of(request).xet is None:
        for item in items:
            item.pop("xetHash", None)
    return items


def _is_true(request: Request, name: str) -> bool:
    return request.query_params.get(name, "").lower() in ("true", "1")


def _next(request: Request, last: str) -> str:
    query = urlencode({**request.query_params, "cursor": last})
    return f'<{hub_of(request).endpoint}{request.scope["path"]}?{query}>; rel="next"'


ROUTES = [
    Route("/api/{kind}/{namespace}/{name}/tree/{rev}", tree),
    Route("/api/{kind}/{namespace}/{name}/tree/{rev}/{path:path}", tree),
    Route("/api/{kind}/{namespace}/{name}/paths-info/{rev}", paths_info, methods=["POST"]),
]
