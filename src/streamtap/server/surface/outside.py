"""How a caller reached the gateway, for links that lead back to it."""

from __future__ import annotations

import re

from starlette.types import Scope

from streamtap.server.surface.bodies import header

_HOST = re.compile(rb"[A-Za-z0-9._-]{1,255}(:[0-9]{1,5})?|\[[0-9A-Fa-f:.]{2,45}\](:[0-9]{1,5})?")
_SCHEMES = (b"http", b"https")


def base_url(scope: Scope) -> str:
    """Scheme, host and port as the caller sees them, behind a proxy too, which passes ``Host`` on and tells the scheme.

    What a caller makes up here stands in links that nobody else is given.
    """
    headers = scope["headers"]
    told = (header(headers, b"x-forwarded-proto") or b"").split(b",")[0].strip().lower()
    scheme = told if told in _SCHEMES else scope["scheme"].encode()
    host = header(headers, b"host") or b""
    if not _HOST.fullmatch(host):
        name, port = scope.get("server") or ("127.0.0.1", None)
        host = f"{f'[{name}]' if ':' in name else name}{f':{port}' if port else ''}".encode()
    return (scheme + b"://" + host).decode("ascii")
