"""``multipart/form-data``: the form that nnsight's client sends a job in."""

from __future__ import annotations

import re

from streamtap.errors import InvalidInput

_NAME = re.compile(r'\bname="([^"]*)"')
_BOUNDARY = re.compile(r'boundary="?([^";]+)"?')


def form_parts(content_type: str, body: bytes) -> dict[str, bytes]:
    """The parts of a form, by their names.

    Raises:
        InvalidInput: it is no such form.
    """
    boundary = _BOUNDARY.search(content_type)
    if boundary is None:
        raise InvalidInput(f"expected multipart/form-data with a boundary; got {content_type!r}.")
    parts: dict[str, bytes] = {}
    for piece in body.split(b"--" + boundary[1].encode())[1:-1]:
        head, _, content = piece.partition(b"\r\n\r\n")
        name = _NAME.search(head.decode("latin-1"))
        if name is None:
            raise InvalidInput("a part of the form has no name.")
        parts[name[1]] = content.removesuffix(b"\r\n")
    return parts
