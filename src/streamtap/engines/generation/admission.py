"""Check a request against the model, and make its sequences."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from streamtap.capture.steering import Steering
from streamtap.completion import CompletionRequest, Emit
from streamtap.engines.generation.checks import check_request
from streamtap.engines.generation.logs import PromptLogBuilder
from streamtap.engines.generation.rows import RowCollector
from streamtap.engines.generation.running import RequestRun
from streamtap.engines.generation.sampling import Sampler
from streamtap.engines.generation.sequence import SequenceRun
from streamtap.engines.generation.text import TextStream, decoded, text_offsets, token_text
from streamtap.engines.tokenizing import PromptTokenizer
from streamtap.errors import PromptTooLong
from streamtap.wire.counted import check_positions, check_steered_positions


class Admission:
    """What a model takes: its tokenizer, context, layers, width and end tokens."""

    def __init__(
        self,
        tokenizer: PromptTokenizer,
        *,
        n_layers: int,
        hidden: int,
        vocabulary: int,
        end_ids: Collection[int],
        device: torch.device,
    ) -> None:
        self._tokenizer, self._n_layers, self._hidden = tokenizer, n_layers, hidden
        self._vocabulary, self._end_ids, self._device = vocabulary, frozenset(end_ids), device

    def run_of(self, request: CompletionRequest, emit: Emit) -> RequestRun:
        """The request, ready to run.

        Raises:
            InvalidInput: it asks for what this model cannot do; nothing was run.
        """
        check_request(request, self._n_layers)
        prompts = [self._ids(prompt, index, request) for index, prompt in enumerate(request.prompts)]
        check_steered_positions(request.steering, [len(ids) for ids in prompts], request.max_tokens)
        steering = Steering(request.steering, self._n_layers, self._hidden, self._device) if request.steering else None
        sequences = []
        for number, ids in enumerate(prompts):
            text = self._prompt_text(request.prompts[number], ids) if request.echo else ""
            for sample in range(request.n):
                sequences.append(self._sequence(request, number, sample, ids, text))
        return RequestRun(request, sequences, steering, emit)

    def _ids(self, prompt: str | Sequence[int], index: int, request: CompletionRequest) -> tuple[int, ...]:
        ids = self._tokenizer.read(prompt, index, special_tokens=request.add_special_tokens)
        limit = self._tokenizer.context_length
        if limit is not None and len(ids) + request.max_tokens > limit:
            raise PromptTooLong(
                f"prompt {index} has {len(ids)} tokens and max_tokens is {request.max_tokens}; together they may be at "
                f"most the model's context of {limit}.",
                index=index,
            )
        if request.capture is not None:
            check_positions(request.capture, len(ids), request.max_tokens)
        return tuple(ids.tolist())

    def _prompt_text(self, prompt: str | Sequence[int], ids: Sequence[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        return decoded(self._tokenizer.tokenizer, ids)

    def _sequence(
        self, request: CompletionRequest, number: int, sample: int, ids: tuple[int, ...], text: str
    ) -> SequenceRun:
        tokenizer: Any = self._tokenizer.tokenizer

        def text_of(token: int) -> str:
            return token_text(tokenizer, token)

        def builder(top: int | None) -> PromptLogBuilder | None:
            if top is None or sample:  # the other samples of a prompt share the first one's
                return None
            return PromptLogBuilder(ids, top, text_of, text_offsets(tokenizer, ids) if request.echo else ())

        collector = None
        if request.capture is not None:
            collector = RowCollector(request.capture, len(ids), self._hidden, steered=bool(request.steering))
        return SequenceRun(
            index=number * request.n + sample,
            request=request,
            prompt_ids=ids,
            prompt_text=text,
            sampler=Sampler(
                request.sampling,
                prompt_ids=ids,
                vocabulary=self._vocabulary,
                device=str(self._device),
                stream=sample,  # each prompt of a batch draws as it would alone
            ),
            text=TextStream(tokenizer, prompt_ids=ids),
            token_text=text_of,
            end_ids=self._end_ids,
            collector=collector,
            echo_logs=builder(request.logprobs) if request.echo else None,
            prompt_logs=builder(request.prompt_logprobs),
        )
