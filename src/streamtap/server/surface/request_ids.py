"""The id that every response carries, and by which a log line is found."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable

HEADER = b"x-request-id"
_KEPT = re.compile(rb"[A-Za-z0-9_-]{1,64}")


def request_id_of(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The caller's own id where it is short and plain, else a new one."""
    for name, value in headers:
        if name == HEADER and _KEPT.fullmatch(value):
            return value.decode("ascii")
    return new_request_id()


def new_request_id() -> str:
    """A random id that no other starts with or contains."""
    return f"req_{secrets.token_hex(16)}"
