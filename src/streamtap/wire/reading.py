"""JSON to and from outside, read strictly: no NaN, no broken UTF-8, no nesting without end."""

from __future__ import annotations

from typing import Any

import orjson

from streamtap.errors import BadJson


def read_json(raw: bytes | str) -> Any:
    """The value that ``raw`` holds.

    Raises:
        BadJson: it is not JSON; the message says where, and never what stood there.
    """
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        # The parser's error holds the body, which may be a prompt: it must not travel in a traceback.
        raise BadJson(f"the body must be JSON in UTF-8; it is not from {where} on: {error.msg}.") from None


def write_json(value: Any) -> bytes:
    """``value`` as JSON in UTF-8, without spaces; numpy arrays and scalars too."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
