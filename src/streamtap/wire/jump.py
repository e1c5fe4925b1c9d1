"""Over one JSON value that comes in pieces, without looking at more than its end needs.

A value is passed window by window with the machine's own loops: escapes taken out, all but quotes and brackets deleted,
what closes itself removed. A window that might hold the end is made smaller; the last few bytes are read one by one.
"""

from __future__ import annotations

import re

_SCALAR = re.compile(rb"[^,\]}\s]*+")
_QUOTE, _BACKSLASH = b'"\\'
_OPENS, _CLOSES = b"{[", b"}]"
#: Brackets of both kinds as one, and what is left of a value where only quotes and brackets count.
_ONE_KIND = bytes.maketrans(b"[]", b"{}")
_NO_MARK = bytes(set(range(256)) - set(b'"{}[]'))

_READ_ONE_BY_ONE = 64
_FIRST_WINDOW, _MOST_WINDOW = 512, 65_536
#: Rounds of removing what closes itself; JSON is seldom deeper, and what is left is counted one by one.
_ROUNDS = 6


class Jump:
    """The value that begins with the byte ``first``: a string or a container after it, a number or constant at it.

    ``kept`` are its bytes where ``keeps``, else nothing.
    """

    def __init__(self, first: int, *, keeps: bool) -> None:
        self.keeps = keeps
        self.done = False
        self.is_scalar = first != _QUOTE and first not in _OPENS
        self.kept = bytearray([first]) if keeps and not self.is_scalar else bytearray()
        self._in_string = first == _QUOTE
        self._escaped = False
        self._depth = int(first in _OPENS)
        self._window = _FIRST_WINDOW

    def take(self, body: bytes, at: int) -> int:
        """Go on from ``at``, to the value's end, then ``done``, or that of ``body``; the return value is where."""
        start = at
        while at < len(body) and not self.done:
            if self.is_scalar:
                at = _SCALAR.match(body, at).end()  # type: ignore[union-attr]  # it matches nothing as well
                self.done = at < len(body)
            elif self._in_string and not self._depth and (quote := self._plain_end(body, at)):
                at = quote
            else:
                at = self._pass(body, at)
        if self.keeps:
            self.kept += body[start:at]
        return at

    def _plain_end(self, body: bytes, at: int) -> int:
        """Where the string ends if a search for a quote tells, else 0; base64 of rows is one search a piece."""
        if self._escaped:
            return 0
        quote = body.find(b'"', at)
        if quote < 0:
            self._escaped = _ends_escaped(body, at)
            return len(body)
        if quote > at and body[quote - 1] == _BACKSLASH:
            return 0
        self._in_string, self.done = False, True
        return quote + 1

    def _pass(self, body: bytes, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        if self._window <= _READ_ONE_BY_ONE:
            self._window = 2 * _READ_ONE_BY_ONE
            return self._read(body, at, min(len(body), at + _READ_ONE_BY_ONE))
        window = body[at : at + self._window]
        if not self._skim(window):
            self._window //= 4
            return at
        self._window = min(4 * self._window, _MOST_WINDOW)
        return at + len(window)

    def _skim(self, window: bytes) -> bool:
        """Take the whole window; False, and nothing taken, where the value may end inside."""
        text = window.replace(b"\\\\", b"") if b"\\" in window else window
        marks = text.replace(b'\\"', b"").translate(_ONE_KIND, _NO_MARK)
        if not self._depth and b'"' in marks:
            return False
        # Two quotes in a row change nothing for what stands around them.
        parts = marks.replace(b'""', b"").split(b'"')
        lowest, change = _levels(b"".join(parts[self._in_string :: 2]))
        if self._depth and self._depth + lowest <= 0:
            return False
        self._depth += change
        self._in_string ^= len(parts) % 2 == 0
        self._escaped = text.endswith(b"\\")
        return True

    def _read(self, body: bytes, at: int, stop: int) -> int:
        while at < stop and not self.done:
            byte = body[at]
            at += 1
            if self._in_string:
                self._read_in_string(byte)
            elif byte == _QUOTE:
                self._in_string = True
            elif byte in _OPENS:
                self._depth += 1
            elif byte in _CLOSES:
                self._depth -= 1
                self.done = not self._depth
        return at

    def _read_in_string(self, byte: int) -> None:
        if self._escaped:
            self._escaped = False
        elif byte == _BACKSLASH:
            self._escaped = True
        elif byte == _QUOTE:
            self._in_string = False
            self.done = not self._depth


def _levels(brackets: bytes) -> tuple[int, int]:
    """How far down ``brackets`` lead at most, as a number below 0 or 0, and where they end."""
    for _ in range(_ROUNDS):
        if b"{}" not in brackets:
            break
        brackets = brackets.replace(b"{}", b"")
    lowest = level = 0
    if brackets == b"}" * brackets.count(b"}") + b"{" * brackets.count(b"{"):
        return -brackets.count(b"}"), brackets.count(b"{") - brackets.count(b"}")
    for bracket in brackets:
        level += 1 if bracket == _OPENS[0] else -1
        lowest = min(lowest, level)
    return lowest, level


def _ends_escaped(body: bytes, start: int) -> bool:
    """Whether an odd number of backslashes ends ``body[start:]``."""
    if body[-1] != _BACKSLASH:
        return False
    tail = body[start:]
    return (len(tail) - len(tail.rstrip(b"\\"))) % 2 == 1
