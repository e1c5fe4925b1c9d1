"""The application: routes, and the layers around them."""

from __future__ import annotations

from urllib.parse import unquote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from streamtap.testing.hub_server import (
    commit_routes,
    file_routes,
    lfs_routes,
    ref_routes,
    repo_routes,
    tree_routes,
    xet_routes,
)
from streamtap.testing.hub_server.failing import Failing
from streamtap.testing.hub_server.faults import Faults
from streamtap.testing.hub_server.shared import Hub
from streamtap.testing.hub_server.watching import Watch, Watching

_ROUTES = [
    *repo_routes.ROUTES,
    *ref_routes.ROUTES,
    *commit_routes.ROUTES,
    *tree_routes.ROUTES,
    *lfs_routes.ROUTES,
    *file_routes.ROUTES,
    *xet_routes.ROUTES,
]


def build(hub: Hub, faults: Faults, watch: Watch) -> ASGIApp:
    """The server's application, which answers on both of its ports."""
    handlers = {HTTPException: _refused, ClientDisconnect: _gone}
    app = Starlette(routes=_ROUTES, exception_handlers=handlers)  # type: ignore[arg-type]
    app.state.hub = hub
    return Watching(Failing(_AsSent(app), faults), watch)


class _AsSent:
    """Routes see the path as it was sent, for in ``tree/a%2Fb`` the revision is ``a/b``."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw = scope["raw_path"].decode("ascii")
        await self._app({**scope, "path": raw, "decoded_path": unquote(raw)}, receive, send)


async def _refused(request: Request, error: HTTPException) -> Response:
    if request.method == "HEAD":
        return Response(status_code=error.status_code, headers=error.headers)
    return JSONResponse({"error": error.detail}, error.status_code, error.headers)


async def _gone(request: Request, error: ClientDisconnect) -> Response:
    # Nobody reads this answer, but every request must have one.
    return Response(status_code=400)
