"""Prompts as the text by which a dataset names its rows."""

from __future__ import annotations

import json
from collections.abc import Sequence

from streamtap.errors import DatasetDamaged, InvalidInput
from streamtap.spec import Prompt


def dataset_texts(prompts: Sequence[Prompt]) -> list[str]:
    """The text of each prompt; a chat is the JSON of its messages.

    Raises:
        InvalidInput: a prompt of token ids, which has no text.
    """
    return [_text(prompt, place) for place, prompt in enumerate(prompts)]


def _text(prompt: Prompt, place: int) -> str:
    if prompt.text is not None:
        return prompt.text
    if prompt.messages is None:
        raise InvalidInput(f"prompt {place} is token ids; a dataset names its rows by text or chat.")
    return json.dumps([{"role": role, "content": content} for role, content in prompt.messages], ensure_ascii=False)


def prompt_of(text: str, *, is_chat: bool) -> Prompt:
    """The prompt that a dataset's text stands for.

    Raises:
        DatasetDamaged: a chat that is not the JSON of messages.
    """
    if not is_chat:
        return Prompt(text=text)
    try:
        messages = tuple((str(each["role"]), str(each["content"])) for each in json.loads(text))
    except (ValueError, TypeError, KeyError, RecursionError):
        messages = ()
    if not messages:
        raise DatasetDamaged("the index says of a text that it is a chat, and it is not the JSON of one.")
    return Prompt(messages=messages)
