"""Completions on ``vllm.LLM``: one request at a time, each of its samples a sequence with its own rows and vectors."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from streamtap.completion import Cancel, CompletionRequest, Delta, Emit, Event, Failed, Finished, SteeringVector, Usage
from streamtap.engines.generation.checks import check_request
from streamtap.engines.tokenizing import PromptTokenizer
from streamtap.engines.vllm_limits import check_vllm_can, for_vllm
from streamtap.engines.vllm_offline_choices import SampleRun
from streamtap.engines.vllm_offline_llm import Llm, LlmFacts
from streamtap.errors import (
    EngineFailed,
    InvalidInput,
    PromptTooLong,
    ServerRestarting,
    StreamtapError,
)
from streamtap.wire.counted import check_positions, check_steered_positions
from streamtap.wire.steering import check_fits

_LOG = logging.getLogger(__name__)


class Completing:
    """Queues requests for ``llm``; a thread starts with the first and ends with ``close``.

    Args:
        llm: Runs them.
        facts: What it has room for.
        tokenizer: Reads prompts; None in it means token ids only.
        n_layers: Blocks.
        hidden: Width of a row.
    """

    def __init__(self, llm: Llm, facts: LlmFacts, tokenizer: PromptTokenizer, n_layers: int, hidden: int) -> None:
        self._llm, self._facts, self._tokenizer = llm, facts, tokenizer
        self._n_layers, self._hidden = n_layers, hidden
        self._lock = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None
        self._open: set[_Run] = set()
        self._closed = False

    def submit(self, request: CompletionRequest, emit: Emit) -> Cancel:
        """See ``Completes.submit``.

        Raises:
            InvalidInput: the request cannot be run; nothing was queued.
            Unsupported: vLLM with vllm-lens would do something else; ``SteeringUnsupported`` with vectors.
        """
        run = _Run(request, self._samples(request), emit)
        with self._lock:
            if self._closed:
                raise InvalidInput("this engine is closed, so its model is gone; load it again.")
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="streamtap-vllm")
            self._open.add(run)
            done = self._thread.submit(self._work, run)
        done.add_done_callback(lambda ended: self._settle(run, ended))
        return run.cancel

    def close(self) -> None:
        """Fail whatever waits or runs and end the thread."""
        with self._lock:
            self._closed = True
            thread, left = self._thread, list(self._open)
        for run in left:
            run.end(Failed(ServerRestarting("the engine is closing; send the request again.")))
        if thread is not None:
            thread.shutdown()

    def _work(self, run: _Run) -> None:
        for samples in self._at_once(run.samples):
            if run.over:
                return
            outputs = self._llm.generate(
                [sample.prompt_ids for sample in samples],
                [self._llm.params(**sample.parameters()) for sample in samples],
                partial(_watch, run, samples),
            )
            if not outputs:  # it was left
                return
            for sample, output in zip(samples, outputs, strict=True):
                run.tell(sample.finish(output))
        run.end(Finished(tuple(sample.choice() for sample in run.samples), run.usage()))

    def _at_once(self, samples: Sequence[SampleRun]) -> list[list[SampleRun]]:
        """Samples in calls that vLLM has room for: what it runs a second time would have its rows twice.

        Beside another, a prompt whose single positions are steered might run in pieces.
        """
        calls: list[list[SampleRun]] = []
        room = 0
        for sample in samples:
            held = self._facts.held_by(len(sample.prompt_ids) + sample.request.max_tokens)
            if not calls or held > room or _steers_positions(sample.request):
                calls.append([])
                room = self._facts.held_tokens
            calls[-1].append(sample)
            room -= held
        return calls

    def _settle(self, run: _Run, ended: Future[None]) -> None:
        with self._lock:
            self._open.discard(run)
        error = ended.exception()
        if isinstance(error, StreamtapError):
            run.end(Failed(error))
        elif error is not None:
            _LOG.error("a request could not be answered", exc_info=error)
            run.end(Failed(EngineFailed(f"the engine failed with {type(error).__name__}; its log says where.")))

    def _samples(self, request: CompletionRequest) -> list[SampleRun]:
        check_request(request, self._n_layers)
        self._check_logprobs(request)
        for number, vector in enumerate(request.steering):
            check_fits(vector, n_layers=self._n_layers, hidden=self._hidden, at=f"steering vector {number}")
        prompts = [self._ids(request, index) for index in range(len(request.prompts))]
        check_steered_positions(request.steering, [len(ids) for ids in prompts], request.max_tokens)
        steering = [self._vectors(request, ids) for ids in prompts]
        return [
            SampleRun(number * request.n + sample, request, ids, steering[number], self._tokenizer.tokenizer)
            for number, ids in enumerate(prompts)
            for sample in range(request.n)
        ]

    def _ids(self, request: CompletionRequest, index: int) -> tuple[int, ...]:
        ids = self._tokenizer.read(request.prompts[index], index, special_tokens=request.add_special_tokens)
        if len(ids) + max(1, request.max_tokens) > self._facts.context:
            raise PromptTooLong(
                f"prompt {index} has {len(ids)} tokens and max_tokens is {request.max_tokens}; vLLM draws one at "
                f"least, and together they may be at most the engine's context of {self._facts.context}.",
                index=index,
            )
        if request.capture is not None:
            check_positions(request.capture, len(ids), request.max_tokens)
        return tuple(ids.tolist())

    def _check_logprobs(self, request: CompletionRequest) -> None:
        most = self._facts.most_logprobs
        asked = max(request.logprobs or 0, request.prompt_logprobs or 0)
        if most >= 0 and (asked > most or request.prompt_logprobs == -1):
            raise InvalidInput(f"this engine lists at most {most} tokens beside each; load it with max_logprobs=-1.")

    def _vectors(self, request: CompletionRequest, ids: tuple[int, ...]) -> Sequence[SteeringVector]:
        """The vectors as vllm-lens takes them, for one sample of a prompt: a sequence of its own to vLLM."""
        capture = None if request.capture is None else replace(request.capture, positions="all")
        one = replace(request, prompts=(ids,), n=1, max_tokens=max(1, request.max_tokens), capture=capture)
        check_vllm_can(one, runs_whole=len(ids) <= self._facts.step_tokens)
        # Spans that hold no position of this prompt leave nothing.
        return [vector for vector in for_vllm(one, [len(ids)]).steering if vector.vectors.size]


class _Run:
    """One request; nothing is emitted after its end, by whomever."""

    def __init__(self, request: CompletionRequest, samples: Sequence[SampleRun], emit: Emit) -> None:
        self.request, self.samples, self.over = request, samples, False
        self._emit = emit
        self._lock = threading.RLock()  # an emit may cancel

    def cancel(self) -> None:
        """The caller is gone."""
        self.end(None)

    def tell(self, delta: Delta | None) -> None:
        """New text of a sample, to a caller that streams."""
        if delta is not None and self.request.stream:
            with self._lock:
                if not self.over:
                    self._emit(delta)

    def end(self, event: Event | None) -> None:
        """Say the last word, unless it was said."""
        with self._lock:
            if self.over:
                return
            self.over = True
            if event is not None:
                self._emit(event)

    def usage(self) -> Usage:
        """Tokens that ran and that were drawn."""
        firsts = self.samples[:: self.request.n]
        return Usage(sum(len(each.prompt_ids) for each in firsts), sum(len(each.token_ids) for each in self.samples))


def _steers_positions(request: CompletionRequest) -> bool:
    return any(vector.spans is not None or vector.vectors.ndim == 3 for vector in request.steering)


def _watch(run: _Run, samples: Sequence[SampleRun], news: Sequence[tuple[int, Any]]) -> bool:
    """Tell ``run`` what a step gave of its samples; whether to go on. A sample's end comes with its rows, later."""
    for place, output in news:
        if not output.finished:
            run.tell(samples[place].advance(output))
    return not run.over
