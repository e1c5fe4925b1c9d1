"""A capture as one safetensors file: no JSON around the values and no base64.

::

    8 bytes: length of the header ─ header (JSON, padded to 8) ─ int32 tensors ─ residual streams

With one choice the tensors are ``residual_stream`` [layers, rows, hidden], ``layer_indices`` [layers], ``token_ids``
and ``positions`` [rows]; with several each name ends in ``.{i}``. The completion's JSON is ``completion`` in the
metadata.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamtap.codec import WIRE_DTYPES, raw_parts
from streamtap.completion import Choice, Finished
from streamtap.errors import InvalidInput
from streamtap.tensor_file import MOST_HEADER_BYTES, make_header
from streamtap.wire.answers import choice_object, head, prompt_logprobs_parts
from streamtap.wire.reading import write_json

MEDIA_TYPE = "application/vnd.safetensors"
_PIECE_BYTES = 1024 * 1024


def safetensors_answer(finished: Finished, *, id: str, created: int, model: str) -> tuple[int, Iterator[bytes]]:
    """Length of the file in bytes, and its bytes in pieces.

    Raises:
        InvalidInput: the completion's JSON is too large for the file's header.
    """
    tensors = dict(_tensors(finished))
    completion = _completion(finished, head(finished.usage, id=id, created=created, model=model))
    shapes = {name: (values.dtype, values.shape) for name, values in tensors.items()}
    header, _ = make_header(shapes, {"completion": completion})
    size = len(header) + sum(values.nbytes for values in tensors.values())
    return size, _pieces(header, tensors)


def _tensors(finished: Finished) -> Iterator[tuple[str, NDArray[Any]]]:
    """Numbers first: whatever the rows' length, every tensor then starts at a multiple of its item."""
    several = len(finished.choices) > 1
    named = [(f".{choice.index}" if several else "", choice.rows) for choice in finished.choices]
    held = [(ending, rows) for ending, rows in named if rows is not None]
    for ending, rows in held:
        yield f"layer_indices{ending}", np.asarray(rows.layers, np.int32)
        yield f"token_ids{ending}", np.asarray(rows.token_ids, np.int32)
        yield f"positions{ending}", np.asarray(rows.positions, np.int32)
    for ending, rows in held:
        yield f"residual_stream{ending}", rows.values


def _completion(finished: Finished, start: dict[str, Any]) -> str:
    parts = [write_json(start)[:-1], b',"choices":[']
    size = 0
    for place, choice in enumerate(finished.choices):
        parts.append(b"," if place else b"")
        for part in _choice(choice):
            parts.append(part)
            size += len(part)
            if size > MOST_HEADER_BYTES:
                raise InvalidInput(
                    f"the completion's JSON is over {MOST_HEADER_BYTES} bytes, which a safetensors file cannot hold; "
                    "ask for application/json, or for fewer log-probabilities."
                )
    return b"".join([*parts, b"]}"]).decode()


def _choice(choice: Choice) -> Iterator[bytes]:
    yield write_json(choice_object(choice))[:-1]
    if choice.prompt_logs is not None:
        yield b',"prompt_logprobs":'
        yield from prompt_logprobs_parts(choice.prompt_logs)
    yield b"}"


def _pieces(header: bytes, tensors: dict[str, NDArray[Any]]) -> Iterator[bytes]:
    yield header
    for values in tensors.values():
        for part in raw_parts(values) if values.dtype.name in WIRE_DTYPES else [values.astype("<i4").data.cast("B")]:
            for start in range(0, len(part), _PIECE_BYTES):
                yield bytes(part[start : start + _PIECE_BYTES])
