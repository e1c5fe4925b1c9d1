"""A vLLM's answer with rows, made into ours while it passes.

::

    "residual_stream":{"data":"…","dtype":…,"shape":…}}   ─►   "residual_stream":{"dtype":…,"shape":…,"data":"…"},
                                                               "layer_indices":[…],"token_ids":[…]}

Every value is looked at, whichever are wanted. Where all rows are wanted in the dtype in which they come, their text
goes on as it is; else they are chosen, cast and packed anew. A client that takes safetensors gets such a file.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamtap.codec import HEAD_CHARACTERS, WIRE_DTYPES, FrameReader, FrameWriter, raw_parts, said_bytes
from streamtap.completion import Usage
from streamtap.errors import BadJson, CaptureMissed, EngineDead, EngineFailed, InvalidInput, SteeringNotFinite
from streamtap.server.relaying.asked_rows import AskedRows
from streamtap.server.relaying.envelope_text import EnvelopeText, Part
from streamtap.server.relaying.passing_rows import PassingRows
from streamtap.server.relaying.upstream import read_said
from streamtap.tensor_file import MOST_HEADER_BYTES, make_header
from streamtap.wire.completions import UNKNOWN
from streamtap.wire.counted import fed_positions
from streamtap.wire.reading import read_json, write_json
from streamtap.wire.scan import BodyScanner

#: Most of what stands before the rows that is kept to find the tokens in it.
_MOST_HEAD_BYTES = 4 * 1024 * 1024
#: What is made goes on when it is worth a write.
_PIECE_BYTES = 1024 * 1024
#: Text that is unpacked in one go where what it holds has to wait: a few bytes of a frame may hold a lot.
_TEXT_BYTES = 4 * 1024
_MOST_ID = 2**31 - 1
_PROMPT_IDS, _NEW_IDS = (
    re.compile(rb'(?<!\\)"' + name + rb'"\s*:\s*(\[[0-9,\s]*\])') for name in (b"prompt_token_ids", b"token_ids")
)
_WAY = re.compile(rb',\s*"activations"\s*:\s*\{\s*"residual_stream"\s*:\s*\Z')


async def mapped_rows(pieces: AsyncIterator[bytes], asked: AskedRows, *, binary: bool) -> AsyncGenerator[bytes, None]:
    """``pieces`` of a vLLM's JSON answer as pieces of ours, or of a safetensors file; the work is done in a thread.

    Raises:
        CaptureMissed: rows that lack, or that no working engine gives.
        SteeringNotFinite: a value is not finite, and vectors may have made it so.
        EngineFailed: the answer is none that can be read on its way.
        EngineDead: it ended early, where that is a file.
        InvalidInput: the completion's JSON is too large for the file's header.
    """
    rows = VllmRows(asked, binary=binary)
    is_over = False
    while not is_over:
        piece = await anext(pieces, None)
        is_over = piece is None
        made, more = rows.end() if piece is None else rows.feed(piece), True
        while more:
            text, more = await asyncio.to_thread(_some, made)
            if text:
                yield text


def _some(made: Iterator[bytes]) -> tuple[bytes, bool]:
    """What is worth a write, and whether there may be more."""
    held: list[bytes] = []
    size = 0
    for part in made:
        held.append(part)
        size += len(part)
        if size >= _PIECE_BYTES:
            return b"".join(held), True
    return b"".join(held), False


class VllmRows:
    """Takes the answer to one request of one prompt; a body without rows comes out as it is."""

    def __init__(self, asked: AskedRows, *, binary: bool) -> None:
        self._asked = asked
        self._binary = binary
        self._text = EnvelopeText()
        self._scanner = BodyScanner()
        self._head = bytearray()
        self._before = self._data = b""
        self._capture: _Capture | None = None
        self._is_over = self._is_told = False
        self._steps: dict[Part, Callable[[bytes], Iterator[bytes]]] = {
            "beside": self._take_beside,
            "before": self._take_before,
            "data": self._take_data,
            "after": self._take_after,
        }

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """What can go on once ``piece`` is in.

        Raises:
            CaptureMissed: as ``mapped_rows``, and so are others.
        """
        self._scanner.feed(piece)
        for part, text in self._text.feed(piece):
            yield from self._steps[part](text)

    def end(self) -> Iterator[bytes]:
        """The rest of it, now that the body is over.

        Raises:
            CaptureMissed: there were no rows, where those are all that a file is for; ``EngineDead`` alike.
        """
        if self._binary:
            self._check_file()
        yield from self._take_beside(self._text.rest())

    def _check_file(self) -> None:
        """What of JSON is seen by whoever passes it on, and of a file no longer."""
        if self._scanner.error is not None:
            raise read_said({"error": self._scanner.error}, 500)
        if not self._scanner.complete:
            raise EngineDead("the model's engine ended in the middle of its answer; send the request again.")
        if self._capture is None:
            layer = self._asked.capture.layers[0]
            raise CaptureMissed("the engine's answer holds no rows; nothing of it is passed on as data.", layer=layer)

    def _take_beside(self, text: bytes) -> Iterator[bytes]:
        if self._binary and self._capture is not None:
            return
        if self._capture is None:
            self._keep(text)
        elif self._is_over and not self._is_told and text.strip():
            # A worker of ours tells it here itself.
            self._is_told = True
            if text.lstrip()[:1] == b"}":
                yield b"," + write_json(self._capture.told)[1:-1]
        if not self._binary:
            yield text

    def _keep(self, text: bytes) -> None:
        if self._binary or len(self._head) <= _MOST_HEAD_BYTES:
            self._head += text
        if len(self._head) > MOST_HEADER_BYTES:
            raise InvalidInput(
                f"the completion's JSON is over {MOST_HEADER_BYTES} bytes, which a safetensors file cannot hold; "
                "ask for application/json, or for fewer log-probabilities."
            )

    def _take_before(self, text: bytes) -> Iterator[bytes]:
        if self._capture is not None:
            raise EngineFailed("the model's engine sent two captures for one prompt; send the request again.")
        self._before = text
        return iter(())

    def _take_data(self, text: bytes) -> Iterator[bytes]:
        if self._capture is not None:
            yield from self._capture.feed(text)
            return
        self._data += text
        if len(self._data) >= HEAD_CHARACTERS:
            yield from self._begun()

    def _take_after(self, text: bytes) -> Iterator[bytes]:
        if self._capture is None:
            yield from self._begun()
        assert self._capture is not None
        self._capture.check_declared(self._before + text)
        yield from self._capture.end()
        self._is_over = True

    def _begun(self) -> Iterator[bytes]:
        usage = self._scanner.usage
        if usage is None:
            raise EngineFailed(
                "the model's engine sent rows before it said how many tokens it ran; nothing is passed on."
            )
        head = bytes(self._head)
        self._head.clear()
        # Where a part of it was left out, the tokens may have stood there.
        tokens = _tokens(head, usage) if self._binary or len(head) <= _MOST_HEAD_BYTES else None
        self._capture = _Capture(self._asked, usage, tokens, self._data, binary=self._binary)
        yield from self._capture.begin(head)
        yield from self._capture.feed(self._data)
        self._data = b""


class _Capture:
    """The rows themselves, once it is known how many there are."""

    def __init__(
        self, asked: AskedRows, usage: Usage, tokens: NDArray[np.int32] | None, data: bytes, *, binary: bool
    ) -> None:
        self._asked, self._usage, self._binary = asked, usage, binary
        with _as_missed(asked):
            size = said_bytes(data)
        self._dtype = asked.dtype_of(size, usage)
        shape = asked.shape(usage)
        positions = asked.positions(usage)
        has_all = len(positions) == shape[1]
        self._shape = (shape[0], len(positions), shape[2])
        self._goes_on = has_all and self._dtype == asked.wanted and not binary
        self._writer = None if self._goes_on or binary else FrameWriter(math.prod(self._shape) * asked.wanted.itemsize)
        self._made: list[bytes] = []
        looked = PassingRows(
            asked.capture.layers,
            shape,
            self._dtype,
            asked.wanted,
            chosen=None if has_all else np.isin(np.arange(shape[1]), positions),
            steered=asked.steered,
            give=None if self._goes_on else self._give,
        )
        self._reader = FrameReader(size, looked.take)
        self._positions, self._tokens = positions, None if tokens is None else tokens[positions]
        self.told = self._beside_rows(has_all)

    def begin(self, head: bytes) -> Iterator[bytes]:
        """What stands before the values; ``head`` is what came before the envelope."""
        if self._binary:
            yield from self._file_head(head)
            return
        dtype, original = WIRE_DTYPES[self._asked.wanted.name]
        about = {"dtype": dtype, "original_dtype": original, "shape": self._shape, "compression": "zstd"}
        yield write_json(about)[:-1] + b',"data":"'

    def feed(self, text: bytes) -> Iterator[bytes]:
        """The next values; the text itself, once all that it holds was looked at, where it goes on as it is."""
        step = _TEXT_BYTES if self._binary else max(1, len(text))
        for start in range(0, len(text), step):
            with _as_missed(self._asked):
                self._reader.feed(text[start : start + step])
            yield from self._taken()
        if self._goes_on:
            yield text

    def end(self) -> Iterator[bytes]:
        """What stands behind the values, which are whole now."""
        with _as_missed(self._asked):
            self._reader.end()
        yield from self._taken()
        if self._writer is not None:
            yield from self._writer.end()
        if not self._binary:
            yield b'"}'

    def check_declared(self, envelope: bytes) -> None:
        """Hold what the envelope, less its data, says of that against what came."""
        try:
            declared = read_json(envelope)
        except BadJson as error:
            raise EngineFailed("the model's engine sent an answer that is not JSON; send the request again.") from error
        self._asked.check_declared(declared, self._usage, self._dtype)

    def _give(self, values: NDArray[Any]) -> None:
        self._made.extend(map(bytes, raw_parts(values)) if self._writer is None else self._writer.take(values))

    def _taken(self) -> Iterator[bytes]:
        made, self._made = self._made, []
        yield from made

    def _beside_rows(self, has_all: bool) -> dict[str, Any]:
        told: dict[str, Any] = {"layer_indices": list(self._asked.capture.layers)}
        if self._tokens is not None:
            told["token_ids"] = self._tokens
        return told if has_all else told | {"positions": self._positions}

    def _file_head(self, head: bytes) -> Iterator[bytes]:
        way = _WAY.search(head)
        if way is None:
            raise EngineFailed("the model's engine sent rows where none are expected; send the request again.")
        unknown = np.full(len(self._positions), UNKNOWN, np.int32)
        numbers = {
            "layer_indices": np.array(self._asked.capture.layers, np.int32),
            "token_ids": unknown if self._tokens is None else self._tokens,
            "positions": self._positions,
        }
        kinds: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {
            name: (values.dtype, values.shape) for name, values in numbers.items()
        }
        kinds["residual_stream"] = (self._asked.wanted, self._shape)
        # What is no UTF-8 is no JSON either, which is seen when the header is read.
        completion = (head[: way.start()] + b"}").decode(errors="replace")
        yield make_header(kinds, {"completion": completion})[0]
        for values in numbers.values():
            yield values.astype("<i4").tobytes()


@contextmanager
def _as_missed(asked: AskedRows) -> Iterator[None]:
    """What cannot be read as rows is the engine's failure, not the caller's."""
    try:
        yield
    except SteeringNotFinite:
        raise
    except InvalidInput as error:
        raise CaptureMissed(f"the engine's rows cannot be read: {error}", layer=asked.capture.layers[0]) from error


def _tokens(head: bytes, usage: Usage) -> NDArray[np.int32] | None:
    """The tokens that went through the model, int32, where the engine tells all of them."""
    prompt, new = _ids(_PROMPT_IDS, head), _ids(_NEW_IDS, head)
    fed = fed_positions(usage.prompt_tokens, usage.completion_tokens)
    tokens = [*prompt, *new][:fed]
    if len(prompt) != usage.prompt_tokens or len(tokens) != fed or max(tokens, default=0) > _MOST_ID:
        return None
    return np.array(tokens, np.int32)


def _ids(pattern: re.Pattern[bytes], head: bytes) -> list[int]:
    found = pattern.search(head)
    try:
        return [] if found is None else list(read_json(found[1]))
    except BadJson:
        return []
