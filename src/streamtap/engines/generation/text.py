"""Token ids to text, one at a time, never showing a character that the next token could still change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

from streamtap.engines.generation.pieces import REPLACEMENT, pieces_of

#: Bytes that may still be missing their character's end; a decoder shows each, or all of them, as one mark.
_MOST_OPEN_BYTES = 3
#: A UTF-8 reader that starts inside a character is in step again after so many bytes, each a mark of its own at most.
_RESYNC = 3
#: Tokens that are decoded again as context, and the most that a window holds before it is cut down to them.
_CONTEXT, _WINDOW = 24, 64


class TextStream:
    """The text of one sequence as its tokens come.

    What ``push`` and ``end`` gave, joined, is the one-shot decode of the ids. A decoder of byte pieces (``<0xE2>``)
    judges a run of them as a whole, so a run is held until another token ends it.

    Args:
        tokenizer: A Hugging Face tokenizer, or None where prompts are token ids only: all text is then empty.
        skip_special_tokens: Whether special tokens have no text.
        prompt_ids: What stands before; it is not given out, but decides on a leading space. Where it ends inside a
            character, that character belongs to what follows.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True, prompt_ids: Sequence[int] = ()) -> None:
        #: Characters given so far: where the next token's text begins.
        self.offset = 0
        self._pieces = None if tokenizer is None else pieces_of(tokenizer)
        self._skip = skip_special_tokens
        self._ids = self._context_of(prompt_ids)
        self._prompt: str | None = self._decoded(self._ids)
        self._given = len(self._prompt or "")

    def push(self, token_id: int) -> str:
        """The text that became certain with ``token_id``."""
        if self._pieces is None or not self._pieces.shows(token_id, self._skip):
            return ""
        self._ids.append(token_id)
        if self._pieces.is_byte(token_id):
            return ""
        text = self._decoded(self._ids)
        fresh = self._give(text, _settled(text))
        if len(self._ids) > _WINDOW:
            self._shorten(text)
        return fresh

    def end(self) -> str:
        """What was held back; the sequence is over."""
        text = self._decoded(self._ids)
        self._prompt, prompt = None, self._prompt
        return self._cut(text, len(text), prompt)

    def _give(self, text: str, settled: int) -> str:
        if self._prompt is not None and settled < len(self._prompt):
            return ""  # The prompt's last character is still open.
        self._prompt, prompt = None, self._prompt
        return self._cut(text, settled, prompt)

    def _cut(self, text: str, settled: int, prompt: str | None) -> str:
        if prompt is not None:
            self._given = _common_prefix(prompt, text)
        fresh = text[self._given : settled]
        self._given = max(self._given, settled)
        self.offset += len(fresh)
        return fresh

    def _shorten(self, text: str) -> None:
        """Forget old tokens, if the text of the others goes on as that of all of them does."""
        tail = self._context_of(self._ids)
        held = len(text) - self._given
        seen = self._decoded(tail)
        if self._prompt is None and len(seen) > _RESYNC + held and text.endswith(seen[_RESYNC:]):
            self._ids, self._given = tail, len(seen) - held

    def _context_of(self, ids: Sequence[int]) -> list[int]:
        """The last tokens with a text, from one that is not a byte piece: a run of those is judged as a whole."""
        found: list[int] = []
        if self._pieces is None:
            return found
        for token_id in reversed(ids):
            if self._pieces.shows(token_id, self._skip):
                found.append(token_id)
                if len(found) >= _CONTEXT and not self._pieces.is_byte(token_id):
                    break
        return found[::-1]

    def _decoded(self, ids: list[int]) -> str:
        return self._pieces.decoded(ids, self._skip) if self._pieces is not None else ""


def decoded(tokenizer: Any, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
    """All of ``token_ids`` as text, verbatim: no spaces are tidied away, ids that the tokenizer lacks have no text."""
    if tokenizer is None:
        return ""
    pieces = pieces_of(tokenizer)
    shown = [token_id for token_id in token_ids if pieces.shows(token_id, skip_special_tokens)]
    return pieces.decoded(shown, skip_special_tokens)


def token_text(tokenizer: Any, token_id: int) -> str:
    """One token as text, with its leading space; a special token as it is written, part of a character as U+FFFD."""
    return "" if tokenizer is None else pieces_of(tokenizer).text(token_id)


def text_offsets(tokenizer: Any, token_ids: Iterable[int]) -> list[int]:
    """Where each token's text begins in the text of all, in characters; inside a character, where that begins."""
    stream = TextStream(tokenizer)
    found = []
    for token_id in token_ids:
        found.append(stream.offset)
        stream.push(token_id)
    return found


def _settled(text: str) -> int:
    """Characters that no further token changes: all but open bytes at the end."""
    for held in range(_MOST_OPEN_BYTES):
        if not text.endswith(REPLACEMENT, 0, len(text) - held):
            return len(text) - held
    return len(text) - _MOST_OPEN_BYTES


def _common_prefix(one: str, other: str) -> int:
    if other.startswith(one):
        return len(one)
    return next(place for place, (a, b) in enumerate(zip_longest(one, other)) if a != b)
