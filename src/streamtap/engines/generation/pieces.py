"""What the ids of a tokenizer stand for, each looked up once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

#: What a decoder writes for bytes that are no character.
REPLACEMENT = "\ufffd"
_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Pieces:
    """The ids of one Hugging Face tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = _special_ids(tokenizer)
        self._names: dict[int, str | None] = {}
        self._texts: dict[int, str] = {}

    def shows(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Whether the id has a text at all; a model's vocabulary may be larger than its tokenizer's."""
        if skip_special_tokens and token_id in self._special:
            return False
        return self._name(token_id) is not None

    def is_byte(self, token_id: int) -> bool:
        """Whether it stands for one byte, as ``<0xE2>``."""
        name = self._name(token_id)
        return name is not None and _BYTE_PIECE.fullmatch(name) is not None

    def decoded(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of ids that all have one, verbatim: no space is tidied away."""
        if not token_ids:
            return ""
        text = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return str(text)

    def text(self, token_id: int) -> str:
        """One token as text, with its leading space; a special token as it is written."""
        if token_id not in self._texts:
            self._texts[token_id] = self._text(token_id)
        return self._texts[token_id]

    def _text(self, token_id: int) -> str:
        if self._name(token_id) is None:
            return ""
        once = self.decoded([token_id], False)
        if REPLACEMENT in once:
            return once
        # Decoders drop the leading space of a text's first token, so the token is read behind itself.
        return self.decoded([token_id, token_id], False)[len(once) :]

    def _name(self, token_id: int) -> str | None:
        if token_id not in self._names:
            self._names[token_id] = _name_of(self._tokenizer, token_id)
        return self._names[token_id]


@lru_cache(maxsize=4)
def pieces_of(tokenizer: Any) -> Pieces:
    """The one ``Pieces`` of a tokenizer."""
    return Pieces(tokenizer)


def _special_ids(tokenizer: Any) -> frozenset[int]:
    """The ids that ``skip_special_tokens`` leaves out; a fast tokenizer goes by its added tokens' own flags."""
    if getattr(tokenizer, "is_fast", False):
        return frozenset(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
    return frozenset(tokenizer.all_special_ids)


def _name_of(tokenizer: Any, token_id: int) -> str | None:
    try:
        name = tokenizer.convert_ids_to_tokens(token_id)
    except (IndexError, KeyError):  # A tokenizer in Python may look the id up in a plain list.
        return None
    return None if name is None else str(name)
