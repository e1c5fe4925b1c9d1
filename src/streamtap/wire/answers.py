"""A finished completion as a JSON body that is written while it is sent.

::

    {"id", "object", "created", "model", "usage", "choices": [{…, "activations"?}], "activations"?}

``usage`` comes before anything large. A capture of one choice stands at the top, as the public service has it; of
several, each in its choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from streamtap.codec import WIRE_DTYPES, base64_chunks
from streamtap.completion import Choice, Finished, PromptLogs, Rows, Usage
from streamtap.wire.logprobs import logprobs_object, prompt_entry
from streamtap.wire.reading import write_json

#: Small parts are joined until they are worth a write.
_PIECE_BYTES = 1024 * 1024


def json_answer(finished: Finished, *, id: str, created: int, model: str) -> Iterator[bytes]:
    """The body in pieces of about 1 MiB; a small one is a single piece.

    ``model`` is the checkpoint. Rows are compressed as they are asked for, so the caller's pace is kept.
    """
    return _gathered(_parts(finished, head(finished.usage, id=id, created=created, model=model)))


def head(usage: Usage, *, id: str, created: int, model: str) -> dict[str, Any]:
    """What stands before the choices."""
    return {"id": id, "object": "text_completion", "created": created, "model": model, "usage": usage_object(usage)}


def usage_object(usage: Usage) -> dict[str, int]:
    """Tokens as OpenAI counts them."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
    }


def choice_object(choice: Choice) -> dict[str, Any]:
    """The small parts of a choice: neither rows nor the prompt's log-probabilities."""
    return {
        "index": choice.index,
        "text": choice.text,
        "logprobs": None if choice.logs is None else logprobs_object(choice.logs),
        "finish_reason": choice.finish_reason,
        "stop_reason": choice.stop_reason,
    }


def prompt_logprobs_parts(logs: PromptLogs) -> Iterator[bytes]:
    """``prompt_logprobs`` as a JSON array, one position at a time: a whole vocabulary is large."""
    for position in range(len(logs)):
        yield b"," if position else b"["
        yield write_json(prompt_entry(logs.at(position)))
    yield b"]" if len(logs) else b"[]"


def beside_rows(choice: Choice) -> dict[str, Any]:
    """What stands beside ``residual_stream``: layers, tokens, and positions where they are not all."""
    rows = choice.rows
    if rows is None:
        return {}
    told = {"layer_indices": list(rows.layers), "token_ids": np.asarray(rows.token_ids, np.int32)}
    return told if has_every_position(choice, rows) else told | {"positions": np.asarray(rows.positions, np.int32)}


def has_every_position(choice: Choice, rows: Rows) -> bool:
    """Whether the rows are those of every token that was fed."""
    fed = len(choice.prompt_ids) + max(0, len(choice.token_ids) - 1)
    return np.array_equal(rows.positions, np.arange(fed))


def _parts(finished: Finished, start: dict[str, Any]) -> Iterator[bytes]:
    choices = finished.choices
    yield _open(start) + b',"choices":['
    for place, choice in enumerate(choices):
        yield b"," if place else b""
        yield _open(choice_object(choice))
        if choice.prompt_logs is not None:
            yield b',"prompt_logprobs":'
            yield from prompt_logprobs_parts(choice.prompt_logs)
        if len(choices) > 1:
            yield from _activations(choice)
        yield b"}"
    yield b"]"
    if len(choices) == 1:
        yield from _activations(choices[0])
    yield b"}"


def _activations(choice: Choice) -> Iterator[bytes]:
    if (rows := choice.rows) is None:
        return
    dtype, original = WIRE_DTYPES[rows.values.dtype.name]
    envelope = {"dtype": dtype, "original_dtype": original, "shape": rows.values.shape, "compression": "zstd"}
    yield b',"activations":{"residual_stream":' + _open(envelope) + b',"data":"'
    yield from base64_chunks(rows.values)
    yield b'"},' + write_json(beside_rows(choice))[1:]


def _open(value: dict[str, Any]) -> bytes:
    """A JSON object without its closing brace."""
    return write_json(value)[:-1]


def _gathered(parts: Iterable[bytes]) -> Iterator[bytes]:
    held: list[bytes] = []
    size = 0
    for part in parts:
        held.append(part)
        size += len(part)
        if size >= _PIECE_BYTES:
            yield b"".join(held)
            held, size = [], 0
    if held:
        yield b"".join(held)
