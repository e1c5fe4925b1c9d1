"""One event of a streamed completion, as a client reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamtap.completion import Delta, Usage
from streamtap.errors import TransferFailed
from streamtap.wire.logprobs import read_logprobs


def read_chunk(chunk: Mapping[str, Any]) -> tuple[list[Delta], Usage | None]:
    """Deltas of one event, none where it has no choices, and the usage where it tells it.

    Raises:
        TransferFailed: not an event of a completion.
    """
    try:
        deltas = [_delta(choice) for choice in chunk.get("choices") or ()]
        usage = chunk.get("usage")
        return deltas, None if usage is None else Usage(int(usage["prompt_tokens"]), int(usage["completion_tokens"]))
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        # Its text may quote what was written.
        kind = type(error).__name__
    raise TransferFailed(f"the stream holds an event that is not of a completion ({kind}).")


def _delta(choice: Mapping[str, Any]) -> Delta:
    return Delta(
        int(choice.get("index", 0)),
        str(choice.get("text") or ""),
        read_logprobs(choice.get("logprobs") or {}),
        choice.get("finish_reason"),
        choice.get("stop_reason"),
    )
