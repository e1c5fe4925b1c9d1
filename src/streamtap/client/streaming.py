"""A stream of server-sent events, taken in as bytes and given out as deltas.

::

    bytes ─► EventLines ─► data ─► DeltaReader ─► Delta*, usage, or the error that came late
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from streamtap.client.answers import Answer, NoAnswer, media_type
from streamtap.client.calls import EVENTS, Call
from streamtap.client.retrying import Retries, asking
from streamtap.completion import Delta, Usage
from streamtap.errors import StreamtapError, TransferFailed
from streamtap.wire.chunks import read_chunk
from streamtap.wire.errors import read_error
from streamtap.wire.sse import DONE

_LINE_END = re.compile(rb"\r\n|\n|\r")
_END_OF_STREAM = DONE.decode().removeprefix("data: ").strip()


class EventLines:
    """Takes bytes as they come, cut anywhere, and gives the data of each event that is complete."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> list[str]:
        """Data of the events that end in ``chunk``; comments and fields of other names are dropped."""
        self._rest += chunk
        # A carriage return at the very end may be half a line's end.
        end = max(self._rest.rfind(b"\n"), self._rest.rfind(b"\r", 0, len(self._rest) - 1)) + 1
        if not end:
            return []
        lines = _LINE_END.split(bytes(self._rest[:end]))[:-1]
        del self._rest[:end]
        return [data for line in lines if (data := self._line(line)) is not None]

    def _line(self, line: bytes) -> str | None:
        if not line:
            data, self._data = self._data, []
            return "\n".join(data) if data else None
        name, _, value = line.partition(b":")
        if name.removeprefix(b"\xef\xbb\xbf") == b"data":
            self._data.append(value.removeprefix(b" ").decode("utf-8", "replace"))
        return None


class DeltaReader:
    """What has come of a stream so far: deltas that were not taken yet, usage, and whether it is over."""

    def __init__(self) -> None:
        self.usage: Usage | None = None
        self.done = False
        self._lines = EventLines()
        self._deltas: list[Delta] = []
        self._error: StreamtapError | None = None

    @property
    def failed(self) -> bool:
        """Whether an error is next to be taken."""
        return self._error is not None and not self._deltas

    @property
    def begun(self) -> bool:
        """Whether anything came that a caller would notice."""
        return bool(self._deltas or self._error or self.done)

    def feed(self, chunk: bytes) -> None:
        """Take in bytes."""
        for data in self._lines.feed(chunk):
            if not self.done and self._error is None:
                self._event(data)

    def take(self) -> list[Delta]:
        """Deltas since the last time; the error that came after them is raised when they are taken.

        Raises:
            StreamtapError: the server's own error, as its class.
        """
        if self._deltas:
            taken, self._deltas = self._deltas, []
            return taken
        if self._error is not None:
            raise self._error
        return []

    def end(self) -> None:
        """The connection ended.

        Raises:
            StreamtapError: the server's own error, as its class.
            TransferFailed: the stream had not said that it was over.
        """
        self.take()
        if not self.done:
            raise TransferFailed("the stream broke off before its end.")

    def _event(self, data: str) -> None:
        if data == _END_OF_STREAM:
            self.done = True
            return
        chunk = _object(data)
        if chunk is None:
            self._error = TransferFailed("the stream holds an event that is not a JSON object.")
        elif chunk.get("error") is not None:
            self._error = read_error(chunk, 200)
        else:
            self._completion_chunk(chunk)

    def _completion_chunk(self, chunk: Mapping[str, Any]) -> None:
        try:
            deltas, usage = read_chunk(chunk)
        except TransferFailed as error:
            # Raised in its turn, after the text that came before it.
            self._error = error
            return
        self._deltas += deltas
        self.usage = usage or self.usage


@dataclass
class Opened:
    """A stream that has begun: ``chunks`` are what the reader has not seen; ``response`` is to be closed."""

    reader: DeltaReader
    response: Any
    chunks: Any


def is_stream(status: int, headers: Mapping[str, str]) -> bool:
    """Whether events follow; anything else is an answer to be read whole."""
    return status == HTTPStatus.OK and media_type(headers) == EVENTS


def opening(call: Call[Any], retries: Retries | None) -> Generator[float, Opened | Answer | NoAnswer, Opened]:
    """``asking`` for a stream; an error in place of its first delta may be asked again, as that of a whole answer."""

    def read(outcome: Opened | Answer) -> Opened:
        if isinstance(outcome, Answer):
            call.read(outcome)
            raise TransferFailed("the server answered a stream with a whole body; it does not stream.")
        if outcome.reader.failed:
            outcome.reader.take()
        return outcome

    return asking(read, retries)


def _object(data: str) -> Mapping[str, Any] | None:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
