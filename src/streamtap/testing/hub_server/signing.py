"""Links that carry their own permission: signed, and valid for a while."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from urllib.parse import quote, urlencode


class Signer:
    """Signs links with a key of this run; a restart ends all of them."""

    def __init__(self, valid_seconds: float) -> None:
        self._valid_seconds = valid_seconds
        self._key = secrets.token_bytes(32)

    def link(self, base: str, method: str, path: str) -> str:
        """A link to ``path``, for one method only."""
        expires = f"{time.time() + self._valid_seconds:.3f}"
        query = urlencode({"expires": expires, "signature": self._signature(method, path, expires)})
        return f"{base}{quote(path)}?{query}"

    def allows(self, method: str, path: str, expires: str, signature: str) -> bool:
        """Whether the signature is ours, for this method and path, and has not run out."""
        if not hmac.compare_digest(signature, self._signature(method, path, expires)):
            return False
        return float(expires) > time.time()

    def _signature(self, method: str, path: str, expires: str) -> str:
        return hmac.new(self._key, f"{method}\n{path}\n{expires}".encode(), hashlib.sha256).hexdigest()
