"""The ways in which a text or chat may have become tokens, and which of them come to the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_CUTS = (None, "right", "left")
#: Options of a ``CaptureSpec``, in the order in which prompts are looked for; a dataset names them by number.
RULES: tuple[Mapping[str, Any], ...] = tuple(
    {"truncate": cut, "generation_prompt": opened} for opened in (False, True) for cut in _CUTS
)
#: Added to the number of a rule in a dataset's index, where the text is the JSON of a chat.
CHAT = 16
#: In place of a rule, where the text is what a prompt of token ids says: no tokenizer need make these tokens of it.
AS_TOKENS = 32


def plain_rule(number: int, *, is_chat: bool, may_be_cut: bool) -> int:
    """The first rule that gives the same tokens: only a chat is opened, and only a long prompt is cut."""
    opened, cut = divmod(number, len(_CUTS))
    return (opened if is_chat else 0) * len(_CUTS) + (cut if may_be_cut else 0)


def may_be_cut(number: int, n_tokens: int, context_length: int | None) -> bool:
    """Whether a prompt of so many tokens may be the rest of a longer one."""
    return RULES[number]["truncate"] is not None and context_length is not None and n_tokens >= context_length


def same_rules(number: int, *, is_chat: bool, may_be_cut: bool) -> list[int]:
    """Every rule that gives the same tokens as rule ``number``."""
    plain = plain_rule(number, is_chat=is_chat, may_be_cut=may_be_cut)
    return [other for other in range(len(RULES)) if plain_rule(other, is_chat=is_chat, may_be_cut=may_be_cut) == plain]
