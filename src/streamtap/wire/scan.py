"""Looks at an answer on its way through: what it says of itself, without holding it.

::

    feed(bytes)* ─► usage, error, envelopes [{dtype, shape, layer_indices}], data_started, complete

Only the way to what is wanted is followed key by key; everything else is jumped over.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from streamtap.completion import Usage
from streamtap.errors import BadJson
from streamtap.wire.jump import Jump
from streamtap.wire.reading import read_json

_Interest = Literal["follow", "keep", "skip"]
_Shape = tuple[int, int, int]

_SPACE = re.compile(rb"[ \t\r\n]*+")
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_QUOTE, _OPEN_OBJECT, _CLOSE_OBJECT, _OPEN_ARRAY, _CLOSE_ARRAY = b'"{}[]'
_OPENS, _MARKS = b"{[", b"}],:"

#: What is kept of an answer is small, and so are the keys on the way to it.
_MOST_KEPT_BYTES = 4 * 1024 * 1024
_MOST_KEY_BYTES = 4096

_CAPTURE: dict[tuple[str, ...], _Interest] = {
    ("activations",): "follow",
    ("activations", "residual_stream"): "follow",
    ("activations", "residual_stream", "dtype"): "keep",
    ("activations", "residual_stream", "shape"): "keep",
    ("activations", "layer_indices"): "keep",
}
_INTERESTS: dict[tuple[str, ...], _Interest] = {
    (): "follow",
    ("usage",): "keep",
    ("error",): "keep",
    ("choices",): "follow",
    ("choices", "*"): "follow",
    **_CAPTURE,
    **{("choices", "*", *path): interest for path, interest in _CAPTURE.items()},
}


@dataclass
class Envelope:
    """What one capture says of itself; a part is None until it was seen.

    ``layer_indices`` comes after the data.
    """

    dtype: str | None = None
    shape: _Shape | None = None
    layer_indices: tuple[int, ...] | None = None
    data_started: bool = False


class BodyScanner:
    """Reads an answer in pieces of any size; memory stays flat and time linear.

    ``usage`` and ``error`` are those at the top, ``envelopes`` one for each capture in order, ``complete`` whether the
    top-level object has ended. A body that is no JSON object is ``broken``, and never complete.
    """

    def __init__(self) -> None:
        self.usage: Usage | None = None
        self.error: dict[str, Any] | None = None
        self.envelopes: list[Envelope] = []
        self.complete = False
        self.broken = False
        self._path: list[str] = []
        self._in_array: list[bool] = []
        self._expects: Literal["value", "key", "colon", "next"] = "value"
        self._may_close = False
        self._held = b""
        self._jump: Jump | None = None

    @property
    def shapes(self) -> list[_Shape]:
        """Shape of each capture seen so far."""
        return [envelope.shape for envelope in self.envelopes if envelope.shape is not None]

    @property
    def data_started(self) -> bool:
        """Whether the first byte of any rows was seen."""
        return any(envelope.data_started for envelope in self.envelopes)

    def feed(self, chunk: bytes) -> None:
        """Look at the next bytes of the body."""
        body = self._held + chunk if self._held else chunk
        self._held = b""
        at = 0
        while at < len(body) and not self.broken:
            at = self._step(body, at)
        if self.broken:
            self.complete = False

    def _step(self, body: bytes, at: int) -> int:
        """Go on from ``at``; the return value is where to go on next."""
        if self._jump is not None:
            return self._go_on(self._jump, body, at)
        at = _SPACE.match(body, at).end()  # type: ignore[union-attr]  # it matches nothing as well
        if at == len(body):
            return at
        if self._expects == "value":
            return self._begin(body, at)
        if self._expects == "key":
            return self._key(body, at)
        self._mark(body[at : at + 1])
        return at + 1

    def _mark(self, mark: bytes) -> None:
        """A colon, a comma or the end of a container; nothing may follow the whole."""
        if self._expects == "colon" and mark == b":":
            self._expects = "value"
        elif self._in_array and self._expects == "next" and mark == b",":
            self._expect_item(may_close=False)
        elif self._in_array and self._expects == "next" and mark == (b"]" if self._in_array[-1] else b"}"):
            self._close()
        else:
            self.broken = True

    def _expect_item(self, *, may_close: bool) -> None:
        self._may_close = may_close
        self._expects = "value" if self._in_array[-1] else "key"
        if self._in_array[-1]:
            self._path.append("*")

    def _key(self, body: bytes, at: int) -> int:
        if self._may_close and body[at] == _CLOSE_OBJECT:
            self._close()
            return at + 1
        found = _STRING.match(body, at)
        if found is None:
            self._held = body[at:]
            self.broken = body[at] != _QUOTE or len(self._held) > _MOST_KEY_BYTES
            return len(body)
        self._path.append(str(self._parsed(found.group())))
        self._expects = "colon"
        return found.end()

    def _begin(self, body: bytes, at: int) -> int:
        """The first byte of a value."""
        first = body[at]
        interest = _INTERESTS.get(tuple(self._path), "skip")
        if first == _CLOSE_ARRAY and self._may_close and self._in_array and self._in_array[-1]:
            self._path.pop()
            self._close()
        elif first in _MARKS or (not self._path and first != _OPEN_OBJECT):
            self.broken = True
        elif interest == "follow" and first in _OPENS:
            self._open(is_array=first == _OPEN_ARRAY)
        else:
            self._note_data()
            self._jump = Jump(first, keeps=interest == "keep")
            return at if self._jump.is_scalar else at + 1
        return at + 1

    def _open(self, *, is_array: bool) -> None:
        if self._path[-1:] == ["activations"]:
            self.envelopes.append(Envelope())
        self._in_array.append(is_array)
        self._expect_item(may_close=True)

    def _note_data(self) -> None:
        if self._path[-3:] == ["activations", "residual_stream", "data"] and tuple(self._path[:-1]) in _INTERESTS:
            self.envelopes[-1].data_started = True

    def _close(self) -> None:
        self._in_array.pop()
        self._end_value()

    def _end_value(self) -> None:
        self._expects = "next"
        if self._path:
            self._path.pop()
        else:
            self.complete = True

    def _go_on(self, jump: Jump, body: bytes, at: int) -> int:
        at = jump.take(body, at)
        if len(jump.kept) > _MOST_KEPT_BYTES:
            self.broken = True
        if jump.done:
            self._jump = None
            if jump.keeps:
                self._keep(self._parsed(bytes(jump.kept)))
            self._end_value()
        return at

    def _parsed(self, text: bytes) -> Any:
        try:
            return read_json(text)
        except BadJson:
            self.broken = True
            return None

    def _keep(self, value: Any) -> None:
        name = self._path[-1]
        if name == "usage":
            self.usage = read_usage(value)
        elif name == "error":
            self.error = value if isinstance(value, dict) else None
        elif name == "dtype":
            self.envelopes[-1].dtype = value if isinstance(value, str) else None
        elif isinstance(value, list) and all(type(item) is int and item >= 0 for item in value):
            self._keep_numbers(name, tuple(value))

    def _keep_numbers(self, name: str, numbers: tuple[int, ...]) -> None:
        if name == "layer_indices":
            self.envelopes[-1].layer_indices = numbers
        elif len(numbers) == 3:
            self.envelopes[-1].shape = numbers


def read_usage(value: Any) -> Usage | None:
    """The counts that OpenAI's ``usage`` says; None where it says none."""
    if not isinstance(value, dict):
        return None
    prompt, completion = value.get("prompt_tokens"), value.get("completion_tokens")
    if not (isinstance(prompt, int) and isinstance(completion, int)) or min(prompt, completion) < 0:
        return None
    return Usage(prompt, completion)
