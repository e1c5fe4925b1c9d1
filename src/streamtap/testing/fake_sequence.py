"""One choice of a fake completion while it is written: tokens, stops, and text that is certain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from streamtap.completion import Choice, CompletionRequest, Delta, FinishReason, Rows, TokenLog
from streamtap.testing.fake_text import character_of, log_of, next_token, text_of


@dataclass(frozen=True)
class FakePromptLogs:
    """Log-probabilities of a prompt's tokens."""

    token_ids: Sequence[int]
    n_top: int

    def __len__(self) -> int:
        """Prompt tokens."""
        return len(self.token_ids)

    def at(self, position: int) -> TokenLog:
        """The token at ``position`` and its likeliest rivals."""
        offset = len(text_of(self.token_ids[:position]))
        return log_of(self.token_ids[position], self.token_ids[:position], self.n_top, offset)


@dataclass(eq=False)
class FakeSequence:
    """Choice ``index`` of a request: ``sample`` of its prompt number ``prompt_index``."""

    index: int
    request: CompletionRequest
    prompt_ids: Sequence[int]
    prompt_index: int
    sample: int
    new_ids: list[int] = field(default_factory=list)
    text: str = ""
    shown: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | None = None
    logs: list[TokenLog] = field(default_factory=list)

    def step(self) -> Delta:
        """Write one token; the delta holds what no stop string can take back any more."""
        first_log = len(self.logs)
        if not self.new_ids and self.request.echo:
            self._echo()
        if len(self.new_ids) < self.request.max_tokens:
            self._write()
        if self.finish_reason is None and len(self.new_ids) >= self.request.max_tokens:
            self.finish_reason = "length"
        said = self.text[self.shown : max(self.shown, self._certain())]
        self.shown += len(said)
        return Delta(self.index, said, tuple(self.logs[first_log:]), self.finish_reason, self.stop_reason)

    def choice(self, rows: Rows | None) -> Choice:
        """The finished sequence."""
        asked = self.request.prompt_logprobs
        return Choice(
            index=self.index,
            text=self.text,
            prompt_ids=tuple(self.prompt_ids),
            token_ids=tuple(self.new_ids),
            finish_reason=self.finish_reason or "length",
            stop_reason=self.stop_reason,
            logs=None if self.request.logprobs is None else tuple(self.logs),
            prompt_logs=None if asked is None else FakePromptLogs(self.prompt_ids, asked),
            rows=rows,
        )

    def _echo(self) -> None:
        prompt = self.request.prompts[self.prompt_index]
        self.text = prompt if isinstance(prompt, str) else text_of(prompt)
        if self.request.logprobs is not None:
            logs = FakePromptLogs(self.prompt_ids, self.request.logprobs)
            self.logs += [logs.at(position) for position in range(len(logs))]

    def _write(self) -> None:
        before = [*self.prompt_ids, *self.new_ids]
        token = next_token(before, self.request.sampling, self.sample)
        if self.request.logprobs is not None:
            self.logs.append(log_of(token, before, self.request.logprobs, len(self.text)))
        self.new_ids.append(token)
        self.text += character_of(token)
        # Where text ends with several stop strings, it is cut before the longest.
        ends = [stop for stop in self.request.stop if text_of(self.new_ids).endswith(stop)]
        if ends:
            self.stop_reason, self.finish_reason = max(ends, key=len), "stop"
            self.text = self.text[: -len(self.stop_reason)]

    def _certain(self) -> int:
        """How many characters of the text are sure to stay."""
        if self.finish_reason is not None:
            return len(self.text)
        written = text_of(self.new_ids)
        held = [k for stop in self.request.stop for k in range(1, len(stop)) if written.endswith(stop[:k])]
        return len(self.text) - max(held, default=0)
