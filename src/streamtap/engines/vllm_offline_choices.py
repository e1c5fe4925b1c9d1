"""One sample of one prompt on its way through vLLM: what is asked for it, and what its answer says in our words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from streamtap.codec import is_finite
from streamtap.completion import (
    CaptureAsk,
    Choice,
    CompletionRequest,
    Delta,
    FinishReason,
    Rows,
    SteeringVector,
    TokenLog,
)
from streamtap.engines.generation.text import TextStream, decoded
from streamtap.engines.vllm_offline_logs import VllmPromptLogs, token_log
from streamtap.engines.vllm_offline_rows import stream_of
from streamtap.errors import CaptureMissed, EngineFailed, SteeringNotFinite
from streamtap.wire.steering import vector_body

_REASONS: dict[str | None, FinishReason] = {"stop": "stop", "length": "length"}


class SampleRun:
    """A sequence of its own to vLLM, which draws one token at least; with ``max_tokens`` 0 that is thrown away.

    Args:
        index: Its choice's.
        request: What it is part of.
        prompt_ids: What runs.
        vectors: What steers it, as vllm-lens takes them.
        tokenizer: A Hugging Face tokenizer, or None: then nothing has a text.
    """

    def __init__(
        self,
        index: int,
        request: CompletionRequest,
        prompt_ids: tuple[int, ...],
        vectors: Sequence[SteeringVector],
        tokenizer: Any,
    ) -> None:
        self.index, self.request, self.prompt_ids = index, request, prompt_ids
        self.token_ids: tuple[int, ...] = ()
        self._vectors, self._tokenizer = vectors, tokenizer
        self._prompt_text, prompt = "", request.prompts[index // request.n]
        if request.echo:
            self._prompt_text = prompt if isinstance(prompt, str) else decoded(tokenizer, prompt_ids)
        self._stream = TextStream(tokenizer, prompt_ids=prompt_ids)
        self._opened = False
        self._text_said, self._logs_said, self._logged = 0, 0, 0
        self._logs: list[TokenLog] = []
        self._choice: Choice | None = None

    def parameters(self) -> dict[str, Any]:
        """The arguments of its ``SamplingParams``."""
        request, sampling = self.request, self.request.sampling
        arguments: dict[str, Any] = {}
        if request.capture is not None:
            arguments["output_residual_stream"] = list(request.capture.layers)
        if self._vectors:
            arguments["apply_steering_vectors"] = [vector_body(vector) for vector in self._vectors]
        return {
            "max_tokens": max(1, request.max_tokens),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": -1 if sampling.top_k is None else sampling.top_k,
            "min_p": sampling.min_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "repetition_penalty": sampling.repetition_penalty,
            "seed": None if sampling.seed is None else sampling.seed + self.index % request.n,
            "stop": list(request.stop) or None,
            "logprobs": request.logprobs,
            "prompt_logprobs": self._prompt_tops(),
            "extra_args": arguments or None,
        }

    def advance(self, output: Any) -> Delta | None:
        """What an answer says that was not said before, or None."""
        text = self._opening(output)
        if self.request.max_tokens:
            (told,) = output.outputs
            text += told.text[self._text_said :]
            self._text_said = max(self._text_said, len(told.text))
            self._take_logs(told)
        logs = tuple(self._logs[self._logs_said :])
        self._logs_said = len(self._logs)
        return Delta(self.index, text, logs) if text or logs else None

    def finish(self, output: Any) -> Delta:
        """Take the last answer: what was not said before, and how it ended.

        Raises:
            CaptureMissed: a row lacks or is not finite; ``SteeringNotFinite`` where a vector steers.
            EngineFailed: vLLM broke it off.
        """
        (told,) = output.outputs
        if told.finish_reason not in _REASONS:
            raise EngineFailed(f"vLLM broke sample {self.index} off ({told.finish_reason}); send it again.")
        delta = self.advance(output) or Delta(self.index, "")
        reason, why = _REASONS[told.finish_reason], told.stop_reason
        if not self.request.max_tokens:
            reason, why = "length", None
        else:
            self.token_ids = tuple(told.token_ids)
        if reason == "stop" and why is None:  # an end token, which vLLM does not name
            why = self.token_ids[-1]
        self._choice = self._finished(output, told.text if self.request.max_tokens else "", reason, why)
        return Delta(self.index, delta.text, delta.logs, reason, why)

    def choice(self) -> Choice:
        """The finished sample."""
        assert self._choice is not None, "finish comes before choice"
        return self._choice

    def _finished(self, output: Any, text: str, reason: FinishReason, why: str | int | None) -> Choice:
        request, prompt_logs = self.request, None
        if request.prompt_logprobs is not None:
            prompt_logs = VllmPromptLogs(self.prompt_ids, output, request.prompt_logprobs, self._tokenizer)
        return Choice(
            index=self.index,
            text=self._prompt_text + text,
            prompt_ids=self.prompt_ids,
            token_ids=self.token_ids,
            finish_reason=reason,
            stop_reason=why,
            logs=tuple(self._logs) if request.logprobs is not None else None,
            prompt_logs=prompt_logs,
            rows=None if request.capture is None else self._rows(output, request.capture),
        )

    def _prompt_tops(self) -> int | None:
        """How many tokens vLLM is to list beside each of the prompt's."""
        request = self.request
        asked = [request.prompt_logprobs, request.logprobs if request.echo else None]
        numbers = [each for each in asked if each is not None]
        if not numbers:
            return None
        return -1 if -1 in numbers else max(numbers)

    def _opening(self, output: Any) -> str:
        """The prompt, where it is echoed and was not yet."""
        if self._opened or not self.request.echo:
            return ""
        self._opened = True
        if self.request.logprobs is not None:
            logs = VllmPromptLogs(self.prompt_ids, output, self.request.logprobs, self._tokenizer, offsets=True)
            self._logs += [logs.at(position) for position in range(len(logs))]
        return self._prompt_text

    def _take_logs(self, told: Any) -> None:
        if self.request.logprobs is None:
            return
        for place in range(self._logged, len(told.token_ids)):
            token, offset = told.token_ids[place], len(self._prompt_text) + self._stream.offset
            self._stream.push(token)
            self._logs.append(token_log(token, told.logprobs[place], self.request.logprobs, self._tokenizer, offset))
        self._logged = len(told.token_ids)

    def _rows(self, output: Any, ask: CaptureAsk) -> Rows:
        """Rows of what went through the model: the token drawn last did not."""
        every = (*self.prompt_ids, *output.outputs[0].token_ids)
        fed = len(every) - 1
        stream = stream_of(output, ask.layers, fed, f"sample {self.index}")
        positions = np.array(_chosen(ask, len(self.prompt_ids), fed), np.int32)
        rows = stream[:, positions]
        for layer, values in zip(ask.layers, rows, strict=True):
            self._check(layer, values)
        wide = rows.astype(ml_dtypes.bfloat16 if ask.dtype == "bfloat16" else np.float32, copy=False)
        return Rows(ask.layers, wide, positions, np.array(every, np.int32)[positions])

    def _check(self, layer: int, rows: Any) -> None:
        if not is_finite(rows):
            if self.request.steering:
                raise SteeringNotFinite(
                    f"block {layer} put out a value that is not finite under the steering vectors of this request; "
                    "lower their scale."
                )
            raise CaptureMissed(f"block {layer} put out a value that is not finite.", layer=layer)
        if len(rows) > 1 and not rows.any() and not self.request.steering:
            raise CaptureMissed(f"block {layer} put out only zeros, which no working device gives.", layer=layer)


def _chosen(ask: CaptureAsk, prompt_tokens: int, fed: int) -> Sequence[int]:
    """Positions that have a row, of ``fed``, the first ``prompt_tokens`` of them the prompt's."""
    if isinstance(ask.positions, tuple):
        return [position for position in ask.positions if position < fed]
    return {
        "all": range(fed),
        "last": range(fed - 1, fed),
        "prompt": range(prompt_tokens),
        "generated": range(prompt_tokens, fed),
    }[ask.positions]
