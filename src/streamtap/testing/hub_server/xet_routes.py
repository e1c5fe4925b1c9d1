"""Where a client's Xet library is to write to and to read from."""

from __future__ import annotations

import re
import time
from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from streamtap.testing.hub_server.shared import commit_at, hub_of, param, reading, refusal, writing
from streamtap.testing.hub_server.xet_store import XetStore

_COMMIT_ID = re.compile(r"[0-9a-f]{40}")
_VALID_SECONDS = 3600


async def write_token(request: Request) -> Response:
    """``GET /api/{repository}/xet-write-token/{revision}``."""
    writing(request)
    return _token(_store(request).to_write(), _VALID_SECONDS)


async def read_token(request: Request) -> Response:
    """``GET /api/{repository}/xet-read-token/{revision}``: a folder with the large files of that commit."""
    repository = reading(request)
    commit = commit_at(request, repository)
    files = {entry.sha256: repository.content(entry) for entry in commit.tree.values() if entry.xet_hash}
    place = _store(request).to_read(commit.id, files.values())
    # A branch may move on, and the client asks again only for a token that ran out.
    return _token(place, _VALID_SECONDS if _COMMIT_ID.fullmatch(param(request, "rev")) else 0)


def _store(request: Request) -> XetStore:
    store = hub_of(request).xet
    if store is None:
        raise refusal(404, "this Hub was started without Xet; set HF_HUB_DISABLE_XET=1")
    return store


def _token(place: Path, valid_seconds: int) -> Response:
    token, expires, url = "local", int(time.time()) + valid_seconds, f"local://{place}"
    headers = {"X-Xet-Access-Token": token, "X-Xet-Token-Expiration": str(expires), "X-Xet-Cas-Url": url}
    return JSONResponse({"accessToken": token, "exp": expires, "casUrl": url}, headers=headers)


ROUTES = [
    Route("/api/{kind}/{namespace}/{name}/xet-write-token/{rev}", write_token),
    Route("/api/{kind}/{namespace}/{name}/xet-read-token/{rev}", read_token),
]
