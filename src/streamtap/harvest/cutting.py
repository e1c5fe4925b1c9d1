"""``Cutting``: prompts or documents to token ids, cut to a context or in windows of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from streamtap.engines.tokenizing import PromptTokenizer
from streamtap.errors import InvalidInput
from streamtap.harvest.plan import Tokenised, read_prompts
from streamtap.harvest.windows import Document, bounded, check_context, windows
from streamtap.spec import PromptLike


@dataclass(frozen=True)
class Cutting:
    """How prompts or documents become what runs.

    Args:
        context: Longest prompt or window, in tokens; None is the model's context.
        chunk: Cut each document into windows; else what is longer than ``context`` loses its end.
        pack: Fill each window with the next document where one ends; it takes ``chunk`` for granted.
        max_tokens: Stop before the prompt or window that would make it more, over all.

    Raises:
        InvalidInput: a value that cannot be.
    """

    context: int | None = None
    chunk: bool = False
    pack: bool = False
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        """Check what needs no model."""
        for name in ("context", "max_tokens"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise InvalidInput(f"{name} must be a whole number of tokens, at least 1; got {value!r}.")

    def tokenised(
        self, prompts: Iterable[PromptLike | Document], tokenizer: PromptTokenizer, *, add_special_tokens: bool
    ) -> Iterator[Tokenised]:
        """What runs, in order.

        Raises:
            InvalidInput: a context that the model does not have.
            InvalidPrompt: one cannot be run; its index or row is named.
        """
        context = tokenizer.context_length if self.context is None else self.context
        if context is not None:
            check_context(context, tokenizer)
        if self.chunk or self.pack:
            if context is None:
                raise InvalidInput("this model names no longest context; say how long a window is with context.")
            return windows(
                prompts,
                tokenizer,
                context=context,
                pack=self.pack,
                max_tokens=self.max_tokens,
                add_special_tokens=add_special_tokens,
            )
        values = (_content(each) for each in prompts)
        found = read_prompts(values, _shortened(tokenizer, context), add_special_tokens=add_special_tokens)
        return found if self.max_tokens is None else bounded(found, self.max_tokens)


def _content(prompt: PromptLike | Document) -> Any:
    return prompt.content if isinstance(prompt, Document) else prompt


def _shortened(tokenizer: PromptTokenizer, context: int | None) -> PromptTokenizer:
    return PromptTokenizer(
        tokenizer.tokenizer,
        context_length=context,
        vocabulary=tokenizer.vocabulary,
        special_ids=tokenizer.special_ids.tolist(),
    )
