"""What a service wrote, as an engine tells it: choices with their tokens, as far as these are certain."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from streamtap.completion import Choice, Completion, Delta, FinishReason, TokenLog
from streamtap.engines.api_asked import Asked
from streamtap.engines.generation.text import token_text
from streamtap.engines.tokenizing import PromptTokenizer

#: Several ids that are written alike.
_SEVERAL = -1


class TokenNames:
    """Which token a text is: a service tells what each token that it wrote says, and not which it is."""

    def __init__(self, tokenizer: PromptTokenizer) -> None:
        self._tokenizer = tokenizer
        self._table: dict[str, int] | None = None
        self._making = threading.Lock()

    def ids(self, texts: Sequence[str], known: Mapping[int, int]) -> tuple[int, ...]:
        """The ids of tokens by their texts, or by ``known``, place to id; none where one of them is not certain."""
        found = [known.get(place, _SEVERAL) for place in range(len(texts))]
        for place, text in enumerate(texts):
            if found[place] == _SEVERAL:
                found[place] = self._named(text)
        return () if _SEVERAL in found else tuple(found)

    def _named(self, text: str) -> int:
        with self._making:
            if self._table is None:
                self._table = self._read()
        return self._table.get(text, _SEVERAL)

    def _read(self) -> dict[str, int]:
        tokenizer: Any = self._tokenizer.tokenizer
        if tokenizer is None or not hasattr(tokenizer, "convert_ids_to_tokens"):
            return {}
        table: dict[str, int] = {}
        for token_id in range(self._tokenizer.vocabulary or len(tokenizer)):
            text = token_text(tokenizer, token_id)
            table[text] = _SEVERAL if text in table else token_id
        return table


def choices_of(completion: Completion, asked: Asked, names: TokenNames) -> tuple[Choice, ...]:
    """The choices of an answer, in order, with the prompts' ids and, beside rows, those that were written."""
    return tuple(_choice(choice, asked, names) for choice in completion.choices)


def _choice(choice: Choice, asked: Asked, names: TokenNames) -> Choice:
    prompt = asked.prompt_of(choice.index)
    new_ids: tuple[int, ...] = ()
    if choice.rows is not None and choice.logs is not None:
        start = len(prompt)
        own = choice.logs[start:] if asked.request.echo else choice.logs
        pairs = zip(choice.rows.positions.tolist(), choice.rows.token_ids.tolist(), strict=True)
        known = {position - start: token for position, token in pairs if position >= start and token >= 0}
        new_ids = names.ids([log.text for log in own], known)
    return replace(choice, prompt_ids=prompt, token_ids=new_ids, logs=choice.logs if asked.wants_logs else None)


@dataclass
class Written:
    """One choice as its deltas tell it."""

    text: str = ""
    logs: list[TokenLog] = field(default_factory=list)
    finish_reason: FinishReason = "length"
    stop_reason: str | int | None = None

    def take(self, delta: Delta) -> None:
        """Add what one delta tells."""
        self.text += delta.text
        self.logs += delta.logs
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    def choice(self, index: int, asked: Asked) -> Choice:
        """The whole of it."""
        return Choice(
            index=index,
            text=self.text,
            prompt_ids=asked.prompt_of(index),
            token_ids=(),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logs=tuple(self.logs) if asked.wants_logs else None,
        )
