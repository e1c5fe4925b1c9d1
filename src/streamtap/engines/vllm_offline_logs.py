"""vLLM's log-probabilities in our words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from streamtap.completion import TokenLog
from streamtap.engines.generation.text import text_offsets, token_text
from streamtap.errors import EngineFailed

#: At one place, by token id: ``logprob`` in nats, and ``rank`` from 1. The token that stands there is among them.
Told = Mapping[int, Any]
_WHOLE_VOCABULARY = -1


class VllmPromptLogs:
    """Those of one prompt; a ``completion.PromptLogs``.

    Args:
        prompt_ids: The prompt.
        output: A ``RequestOutput`` that was asked for them.
        top: How many of the likeliest tokens are listed; -1 for all.
        tokenizer: Says what ids mean.
        offsets: Whether to tell where each token's text begins.

    Raises:
        EngineFailed: they are not there for every token.
    """

    def __init__(
        self, prompt_ids: Sequence[int], output: Any, top: int, tokenizer: Any, *, offsets: bool = False
    ) -> None:
        self._told: Sequence[Told | None] = output.prompt_logprobs or ()
        if len(self._told) != len(prompt_ids) or not all(self._told[1:]):
            raise EngineFailed(f"vLLM told log-probabilities of {len(self._told)} of {len(prompt_ids)} prompt tokens.")
        self._ids, self._top, self._tokenizer = prompt_ids, top, tokenizer
        self._offsets = text_offsets(tokenizer, prompt_ids) if offsets else [0] * len(prompt_ids)

    def __len__(self) -> int:
        return len(self._ids)

    def at(self, position: int) -> TokenLog:
        """The token at ``position`` and its likeliest rivals.

        Raises:
            IndexError: the prompt has no such position.
        """
        if not 0 <= position < len(self):
            raise IndexError(f"position {position} of a prompt of {len(self)} tokens")
        token, told = self._ids[position], self._told[position]
        if position == 0 or told is None:
            return TokenLog(token, token_text(self._tokenizer, token), self._offsets[position], None)
        return token_log(token, told, self._top, self._tokenizer, self._offsets[position])


def token_log(token_id: int, told: Told, top: int, tokenizer: Any, offset: int) -> TokenLog:
    """What is told of ``token_id`` and the ``top`` likeliest tokens, best first."""
    listed = sorted(told.items(), key=lambda item: (item[1].rank, item[0]))
    if top != _WHOLE_VOCABULARY:
        listed = [(each, it) for each, it in listed if it.rank <= top][:top]
    own = told[token_id]
    return TokenLog(
        token_id,
        token_text(tokenizer, token_id),
        offset,
        float(own.logprob),
        int(own.rank),
        tuple((each, token_text(tokenizer, each), float(it.logprob)) for each, it in listed),
    )
