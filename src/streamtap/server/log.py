"""One JSON line on stderr for each request and event: names and counts, never what was said."""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from streamtap.server.surface.trace import Trace

_LOGGER = logging.getLogger("streamtap.server")
_FIELDS = "streamtap_fields"


class JsonLines(logging.Formatter):
    """A record as one line of JSON; of an exception only the class, for its text may quote a request."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        fields = getattr(record, _FIELDS, None)
        # asyncio's second line is the task with its exception's text.
        message = record.getMessage().partition("\n")[0]
        line: dict[str, Any] = {"time": round(record.created, 3), "level": record.levelname.lower()}
        line.update(fields if fields is not None else {"event": record.name, "message": message})
        if record.exc_info and record.exc_info[0] is not None:
            line["error"] = record.exc_info[0].__name__
        return json.dumps(line, default=str)


def log_to_stderr() -> None:
    """Send the service's lines, and the warnings of all that it uses, to stderr as JSON.

    All: Python's own way with a warning that nobody handles prints an exception's text, which may quote a request.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name, level in ((None, logging.WARNING), ("streamtap", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.handlers = [handler] if name is None else []
        logger.propagate = True


def note(event: str, **fields: Any) -> None:
    """Log an event; ``fields`` are names and numbers."""
    _LOGGER.info(event, extra={_FIELDS: {"event": event, **fields}})


def saw(trace: Trace, seconds: float) -> None:
    """Log a request that is over."""
    if _LOGGER.isEnabledFor(logging.INFO):
        told = {
            "request_id": trace.request_id,
            "endpoint": trace.endpoint,
            "key": trace.key_prefix,
            "model": trace.model,
            "status": trace.status,
            "code": trace.code,
            "input_tokens": trace.input_tokens,
            "output_tokens": trace.output_tokens,
            "capture_bytes": trace.capture_bytes,
            "seconds": round(seconds, 4),
        }
        note("request", **{name: value for name, value in told.items() if value not in (None, 0)})
