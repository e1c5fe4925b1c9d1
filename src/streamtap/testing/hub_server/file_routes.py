"""Reading files: small ones from here, large ones by a signed link to the other origin."""

from __future__ import annotations

from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from streamtap.testing.hub_server.ranges import file_answer
from streamtap.testing.hub_server.repositories import PLURALS
from streamtap.testing.hub_server.repository import Entry, Repository
from streamtap.testing.hub_server.shared import KINDS, commit_at, hub_of, no_entry, param, reading, refusal


async def resolve(request: Request) -> Response:
    """``GET /{repository}/resolve/{revision}/{path}``."""
    repository = reading(request)
    commit = commit_at(request, repository)
    path = param(request, "path")
    entry = commit.tree.get(path)
    if entry is None:
        raise no_entry(path, commit)
    headers = {
        "X-Repo-Commit": commit.id,
        "Content-Disposition": f"inline; filename*=UTF-8''{quote(path.rsplit('/', 1)[-1])}",
    }
    if entry.lfs:
        return _moved(request, repository, path, entry, headers)
    return file_answer(request, repository.content(entry), headers | {"ETag": f'"{entry.oid}"'})


def _moved(request: Request, repository: Repository, path: str, entry: Entry, headers: dict[str, str]) -> Response:
    hub = hub_of(request)
    place = f"/cdn/{PLURALS[repository.repo_type]}/{repository.repo_id}/{entry.sha256}/{path}"
    headers |= {
        "Location": hub.signer.link(hub.cdn, "GET", place),
        "X-Linked-Etag": f'"{entry.sha256}"',
        "X-Linked-Size": str(entry.size),
    }
    if hub.xet and entry.xet_hash:
        headers |= _xet_headers(hub.endpoint, repository, headers["X-Repo-Commit"], entry.xet_hash)
    return Response(status_code=302, headers=headers)


def _xet_headers(endpoint: str, repository: Repository, commit_id: str, xet_hash: str) -> dict[str, str]:
    api = f"{endpoint}/api/{PLURALS[repository.repo_type]}/{repository.repo_id}"
    return {"X-Xet-Hash": xet_hash, "X-Xet-Refresh-Route": f"{api}/xet-read-token/{commit_id}"}


async def large(request: Request) -> Response:
    """``GET /cdn/{repository}/{sha256}/{path}``: the link itself is the permission."""
    repository = signed(request, "GET")
    sha256 = param(request, "oid")
    if not repository.lfs.has(sha256):
        raise refusal(404, f"no object {sha256}")
    return file_answer(request, repository.lfs.path(sha256), {"ETag": f'"{sha256}"'})


def signed(request: Request, method: str) -> Repository:
    """The repository of a link that was signed for this method and path and is still valid."""
    hub, query = hub_of(request), request.query_params
    path = str(request.scope["decoded_path"])
    if not hub.signer.allows(method, path, query.get("expires", ""), query.get("signature", "")):
        raise refusal(403, "this link is not signed, was changed, or has run out")
    repo_id = f"{param(request, 'namespace')}/{param(request, 'name')}"
    repository = hub.repositories.find(KINDS.get(param(request, "kind"), ""), repo_id)
    if repository is None:
        raise refusal(404, "the repository is gone")
    return repository


ROUTES = [
    Route("/cdn/{kind}/{namespace}/{name}/{oid}/{path:path}", large),
    Route("/{kind}/{namespace}/{name}/resolve/{rev}/{path:path}", resolve),
    Route("/{namespace}/{name}/resolve/{rev}/{path:path}", resolve),
]
