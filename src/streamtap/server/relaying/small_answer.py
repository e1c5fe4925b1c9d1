"""A JSON answer that came whole in a few pieces: parsed at once, which costs less than looking at it on its way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from streamtap.completion import Usage
from streamtap.errors import BadJson
from streamtap.server.relaying.expected_rows import Shape
from streamtap.wire.reading import read_json
from streamtap.wire.scan import BodyScanner, Envelope, read_usage


class Seen(Protocol):
    """What is known of an answer; ``BodyScanner`` knows it too."""

    usage: Usage | None
    error: dict[str, Any] | None
    envelopes: list[Envelope]
    complete: bool
    broken: bool

    @property
    def shapes(self) -> list[Shape]:
        """Shape of each capture."""
        ...


@dataclass
class SmallAnswer:
    """What a whole body says of itself."""

    usage: Usage | None = None
    error: dict[str, Any] | None = None
    envelopes: list[Envelope] = field(default_factory=list)
    complete: bool = True
    broken: bool = False

    @property
    def shapes(self) -> list[Shape]:
        """Shape of each capture."""
        return [envelope.shape for envelope in self.envelopes if envelope.shape is not None]


def read_small(raw: bytes | bytearray) -> Seen:
    """What ``raw`` says; one that is no whole JSON object is looked at as far as it goes."""
    try:
        body = read_json(bytes(raw))
    except BadJson:
        body = None
    if not isinstance(body, dict):
        scanner = BodyScanner()
        scanner.feed(bytes(raw))
        return scanner
    error = body.get("error")
    return SmallAnswer(
        usage=read_usage(body.get("usage")),
        error=error if isinstance(error, dict) else None,
        envelopes=[Envelope(shape=shape, layer_indices=layers) for shape, layers in _captures(body)],
    )


def _captures(body: dict[str, Any]) -> Iterator[tuple[Shape | None, tuple[int, ...] | None]]:
    choices = body.get("choices")
    for holder in [body, *(choices if isinstance(choices, list) else ())]:
        told = holder.get("activations") if isinstance(holder, dict) else None
        if isinstance(told, dict):
            stream = told.get("residual_stream")
            shape = _numbers(stream.get("shape")) if isinstance(stream, dict) else None
            yield (
                (shape[0], shape[1], shape[2]) if shape and len(shape) == 3 else None,
                _numbers(told.get("layer_indices")),
            )


def _numbers(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, list) and all(type(item) is int and item >= 0 for item in value):
        return tuple(value)
    return None
