"""One sequence on its way: its tokens, its draws, its text, and when it is over."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from streamtap.capture.packed import Piece, States
from streamtap.completion import Choice, CompletionRequest, Delta, FinishReason, PromptLogs, TokenLog
from streamtap.engines.generation.logs import PromptLogBuilder, token_log
from streamtap.engines.generation.rows import RowCollector
from streamtap.engines.generation.sampling import Sampler
from streamtap.engines.generation.stops import StopMatcher
from streamtap.engines.generation.text import TextStream

TokenText = Callable[[int], str]


@dataclass(eq=False)
class SequenceRun:
    """One prompt with one sample of its continuation; ``index`` is its choice's."""

    index: int
    request: CompletionRequest
    prompt_ids: tuple[int, ...]
    prompt_text: str
    sampler: Sampler
    text: TextStream
    token_text: TokenText
    end_ids: Collection[int]
    collector: RowCollector | None = None
    echo_logs: PromptLogBuilder | None = None
    prompt_logs: PromptLogBuilder | None = None
    states: States | None = None
    token_ids: list[int] = field(default_factory=list)
    done: bool = False
    _stops: StopMatcher = field(init=False)
    _text: list[str] = field(default_factory=list)
    _before: int = 0
    _logs: list[TokenLog] = field(default_factory=list)
    _reason: FinishReason = "length"
    _stop_reason: str | int | None = None

    def __post_init__(self) -> None:
        """Watch for the stop strings."""
        self._stops = StopMatcher(self.request.stop)

    @property
    def is_prefilled(self) -> bool:
        """Whether the prompt has run."""
        return bool(self.token_ids) or self.done

    @property
    def goes_on(self) -> bool:
        """Whether tokens after the first will need what earlier ones left."""
        return self.request.max_tokens > 1

    def piece(self, *, resumes: bool) -> Piece:
        """What of it runs in the next pass; the whole where the model cannot go on from states."""
        if not self.token_ids:
            return Piece(self.prompt_ids, 0, self.states, 0)
        last = len(self.prompt_ids) + len(self.token_ids) - 1
        if resumes:
            return Piece(self.token_ids[-1:], last, self.states, last)
        return Piece((*self.prompt_ids, *self.token_ids), 0, None, last)

    def opening(self) -> list[Delta]:
        """What is said before the first token: the prompt, where it was asked to be echoed."""
        if not self.request.echo:
            return []
        logs = self._prompt_entries()
        self._logs[:0] = logs
        self._before = len(self.prompt_text)
        return [Delta(self.index, self.prompt_text, tuple(logs))]

    def take(self, logits: torch.Tensor) -> Delta:
        """Draw the next token from ``logits`` [vocabulary], float32; the sequence may be over with it."""
        token = self.sampler.pick(logits, self.token_ids)
        self.token_ids.append(token)
        logs: tuple[TokenLog, ...] = ()
        if self.request.logprobs is not None:
            offset = self._before + self.text.offset
            logs = (token_log(logits, token, self.request.logprobs, self.token_text, offset),)
            self._logs += logs
        released = self._advance(token)
        self._text.append(released)
        if not self.done:
            return Delta(self.index, released, logs)
        return Delta(self.index, released, logs, self._reason, self._stop_reason)

    def end_without_tokens(self) -> Delta:
        """The sequence is over after its prompt: no token was asked for."""
        self.done = True
        return Delta(self.index, "", (), "length")

    def choice(self) -> Choice:
        """The finished sequence."""
        text = "".join(self._text)
        every = (*self.prompt_ids, *self.token_ids)
        return Choice(
            index=self.index,
            text=self.prompt_text + text if self.request.echo else text,
            prompt_ids=self.prompt_ids,
            token_ids=tuple(self.token_ids),
            finish_reason=self._reason,
            stop_reason=self._stop_reason,
            logs=tuple(self._logs) if self.request.logprobs is not None else None,
            prompt_logs=self._finished_prompt_logs(),
            rows=self.collector.rows(every) if self.collector else None,
        )

    def _advance(self, token: int) -> str:
        """Text that is certain after ``token``, and whether it was the last."""
        if token in self.end_ids:
            return self._end("stop", token)
        released, matched = self._stops.push(self.text.push(token))
        if matched is not None:
            self._finish("stop", matched)
            return released
        if len(self.token_ids) >= self.request.max_tokens:
            return released + self._end("length", None)
        return released

    def _end(self, reason: FinishReason, why: int | None) -> str:
        """No token comes any more: what was held back is certain now, and may still complete a stop string."""
        released, matched = self._stops.push(self.text.end())
        if matched is not None:
            self._finish("stop", matched)
            return released
        self._finish(reason, why)
        return released + self._stops.end()

    def _finish(self, reason: FinishReason, why: str | int | None) -> None:
        self.done, self._reason, self._stop_reason = True, reason, why

    def _prompt_entries(self) -> list[TokenLog]:
        if self.echo_logs is None:
            return []
        logs = self.echo_logs.finished()
        return [logs.at(position) for position in range(len(logs))]

    def _finished_prompt_logs(self) -> PromptLogs | None:
        return None if self.prompt_logs is None else self.prompt_logs.finished()


def room_for(prompt_ids: Sequence[Any], max_tokens: int, at_once: int = 64) -> int:
    """Tokens to make room for at first: the prompt and some of what may come."""
    return len(prompt_ids) + min(max_tokens, at_once)
