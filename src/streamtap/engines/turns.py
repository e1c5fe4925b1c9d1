"""Find the tokens of one role's messages inside a rendered chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from streamtap.errors import InvalidPositions, InvalidPrompt
from streamtap.spec import CaptureSpec, Prompt

if TYPE_CHECKING:
    from streamtap.engines.tokenizing import PromptTokenizer


def role_positions(
    tokenizer: PromptTokenizer, prompt: Prompt, role: str, spec: CaptureSpec, index: int
) -> NDArray[np.int32]:
    """Positions, int32 ascending, of every token that holds text of a message of ``role``.

    The template's own marks around a message are not part of it.

    Raises:
        InvalidPositions: no message has that role, or the template rewrites what it holds.
    """
    messages = prompt.messages or ()
    if role not in {each for each, _ in messages}:
        raise InvalidPositions(
            f"prompt {index} has no message of role {role!r}; it has {sorted({each for each, _ in messages})}."
        )
    rendered = tokenizer.render(prompt, spec, index)
    found = _spans(rendered, _frame(tokenizer, prompt, spec, index), prompt, index)
    spans = [span for span, (each, _) in zip(found, messages, strict=True) if each == role]
    offsets = _offsets(tokenizer, rendered, index)
    inside = np.zeros(len(offsets), bool)
    for start, stop in spans:
        inside |= (offsets[:, 0] < stop) & (offsets[:, 1] > start)
    return np.flatnonzero(inside).astype(np.int32)


def _frame(tokenizer: PromptTokenizer, prompt: Prompt, spec: CaptureSpec, index: int) -> list[str]:
    """What the template writes before, between and behind the messages: one piece more than there are.

    A message's text may stand in the template's own words too ("user"), so it is not searched for.
    """
    marks = [chr(0xE000 + number) for number in range(len(prompt.messages or ()))]  # characters of no script
    marked = Prompt(messages=tuple((role, mark) for (role, _), mark in zip(prompt.messages or (), marks, strict=True)))
    pieces, rest = [], tokenizer.render(marked, spec, index)
    for number, mark in enumerate(marks):
        before, found, rest = rest.partition(mark)
        if not found or mark in rest:
            raise _rewritten(number, index)
        pieces.append(before)
    return [*pieces, rest]


def _spans(rendered: str, frame: Sequence[str], prompt: Prompt, index: int) -> list[tuple[int, int]]:
    """Where each message's text stands in the rendered chat; messages come in order."""
    spans: list[tuple[int, int]] = []
    place = len(frame[0]) if rendered.startswith(frame[0]) else len(rendered) + 1
    for number, ((_, content), behind) in enumerate(zip(prompt.messages or (), frame[1:], strict=True)):
        written = (content, content.strip(), content.lstrip(), content.rstrip())
        text = next((text for text in written if rendered.startswith(text + behind, place)), None)
        if text is None:
            raise _rewritten(number, index)
        spans.append((place, place + len(text)))
        place += len(text) + len(behind)
    return spans


def _rewritten(number: int, index: int) -> InvalidPositions:
    return InvalidPositions(
        f"prompt {index}: the chat template rewrites message {number}, so its tokens cannot be told; "
        "give positions as numbers."
    )


def _offsets(tokenizer: PromptTokenizer, rendered: str, index: int) -> NDArray[np.int64]:
    inner = tokenizer.tokenizer
    if not getattr(inner, "is_fast", False):
        raise InvalidPrompt(
            f"prompt {index}: a role's turns need a fast tokenizer, which knows where its tokens stand in the text.",
            index=index,
        )
    encoded = inner(rendered, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return np.asarray(encoded["offset_mapping"], np.int64).reshape(-1, 2)
