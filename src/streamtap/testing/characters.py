"""A tokenizer of one token a character that needs no library, with the vocabulary of the tiny models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

VOCABULARY = 97
BOS, UNKNOWN = 0, 3
SPECIAL_IDS = (BOS, 1, 2, UNKNOWN)
_FIRST_CHARACTER = 4


class CharacterTokenizer:
    """One token a character, BOS in front of plain text; as much of a fast tokenizer as ours asks for."""

    is_fast = True
    bos_token_id = BOS
    all_special_ids = SPECIAL_IDS
    chat_template = "[role] content"

    def __call__(self, texts: str | Sequence[str], *, add_special_tokens: bool = True, **_: Any) -> dict[str, Any]:
        """Ids and where each token stands in the text; lists of them for a list of texts."""
        if isinstance(texts, str):
            lead = [BOS] if add_special_tokens else []
            spans = [(0, 0)] * len(lead) + [(i, i + 1) for i in range(len(texts))]
            return {"input_ids": lead + [_token(each) for each in texts], "offset_mapping": spans}
        found = [self(text, add_special_tokens=add_special_tokens) for text in texts]
        return {key: [each[key] for each in found] for key in ("input_ids", "offset_mapping")}

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, **_: Any) -> str:
        """The text, with special tokens as their number in angle brackets."""
        kept = [i for i in token_ids if not (skip_special_tokens and i in SPECIAL_IDS)]
        return "".join(f"<{i}>" if i in SPECIAL_IDS else chr(i - _FIRST_CHARACTER + ord(" ")) for i in kept)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], *, tokenize: bool = False, add_generation_prompt: bool = False
    ) -> str:
        """A chat as text, one message a line."""
        lines = [f"[{each['role']}] {each['content']}\n" for each in messages]
        return "".join([*lines, "[assistant] " if add_generation_prompt else ""])


def _token(character: str) -> int:
    number = ord(character) - ord(" ")
    return _FIRST_CHARACTER + number if 0 <= number < VOCABULARY - _FIRST_CHARACTER else UNKNOWN
