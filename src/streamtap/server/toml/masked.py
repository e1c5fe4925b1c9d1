"""Addresses without the passwords in them."""

from __future__ import annotations

import re

_USER = re.compile(r"(?<=://)([^:/@\s]*):([^@\s]*)@")
_QUERY = re.compile(r"(?i)([?&][^=&]*(?:password|secret|token|key)[^=&]*=)[^&\s]*")


def masked_url(url: str) -> str:
    """``url`` with ``***`` where a password stands."""
    return _QUERY.sub(r"\1***", _USER.sub(r"\1:***@", url))
