"""Tells the parts of a JSON answer with a capture apart while it passes, each as soon as it is there.

::

    {"id": …, "activations": {"residual_stream":{"data":"…base64…","shape":…}}, …}
    └────────── beside ──────────────────────┘└─ before ─┘└─ data ─┘└─ after ──┘└ beside

Inside a string of JSON these quotes would have backslashes, so a text cannot bring them about.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Literal

from streamtap.errors import EngineFailed

Part = Literal["beside", "before", "data", "after"]

_NAME = b'"residual_stream"'
_OPENS = re.compile(rb'(?<!\\)"residual_stream"\s*:\s*(\{[^{}]{0,2000}?"data"\s*:\s*")')
#: An envelope without its data is small.
_MOST_BYTES = 4096


class EnvelopeText:
    """Splits a body that comes in pieces of any size; what is held of it is small."""

    def __init__(self) -> None:
        self._part: Part = "beside"
        self._held = b""

    def feed(self, piece: bytes) -> Iterator[tuple[Part, bytes]]:
        """The parts of what is certain now, in order.

        ``data`` is followed by ``after`` as soon as it is over; ``before`` ends with the quote that opens the data, and
        ``after`` begins with the one that closes it.

        Raises:
            EngineFailed: an envelope does not end.
        """
        held = self._held + piece
        while True:
            part, text, held, goes_on = _STEPS[self._part](held)
            if text:
                yield self._part, text
            self._part = part
            if not goes_on:
                break
        self._held = held

    def rest(self) -> bytes:
        """What was held to the end of the body, which stands beside any envelope where the body is whole."""
        held, self._held = self._held, b""
        return held


#: The part that comes next, what is certain of this one, what is left, and whether to go on with that now.
_Step = tuple[Part, bytes, bytes, bool]


def _beside(held: bytes) -> _Step:
    if found := _OPENS.search(held):
        return "before", held[: found.start(1)], held[found.start(1) :], True
    begun = held.rfind(_NAME)
    if begun < 0 or len(held) - begun > _MOST_BYTES:
        # With the byte before it, which says whether its first quote is one.
        begun = len(held) - len(_NAME) + 1
    certain = max(0, begun - 1)
    return "beside", held[:certain], held[certain:], False


def _before(held: bytes) -> _Step:
    found = _BEFORE.match(held)
    if found is None:  # which ``_beside`` has seen already
        raise _endless()
    return "data", found.group(), held[found.end() :], True


def _data(held: bytes) -> _Step:
    quote = held.find(b'"')
    if quote < 0:
        return "data", held, b"", False
    return "after", held[:quote], held[quote:], True


def _after(held: bytes) -> _Step:
    end = held.find(b"}")
    if end >= 0:
        return "beside", held[: end + 1], held[end + 1 :], True
    if len(held) > _MOST_BYTES:
        raise _endless()
    return "after", b"", held, False


def _endless() -> EngineFailed:
    return EngineFailed("the model's engine sent a capture without an end; send the request again.")


_BEFORE = re.compile(rb'\{[^{}]{0,2000}?"data"\s*:\s*"')
_STEPS: dict[Part, Callable[[bytes], _Step]] = {
    "beside": _beside,
    "before": _before,
    "data": _data,
    "after": _after,
}
