"""An engine without torch or a model that writes: letters and rows by formula, one thread a request.

What comes back depends on the prompt, so whatever is mixed up on the way to a client shows.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from streamtap.activations import Provenance
from streamtap.completion import (
    Cancel,
    CaptureAsk,
    Choice,
    CompletionRequest,
    Emit,
    Event,
    Failed,
    Finished,
    SteeringVector,
    Usage,
)
from streamtap.engines.tokenizing import PromptTokenizer
from streamtap.errors import InvalidInput, InvalidLayers, PromptTooLong, ServerRestarting, StreamtapError
from streamtap.spec import CaptureSpec, Prompt
from streamtap.testing.fake_engine import FakeEngine
from streamtap.testing.fake_rows import RowsFault, broken, captured
from streamtap.testing.fake_sequence import FakeSequence

#: What goes wrong: the rows, the request with an error, or the whole process after the first token.
Fault = RowsFault | Literal["error", "die"]
FAULTS: tuple[str, ...] = (*get_args(RowsFault), "error", "die")
_DEAD = 70


@dataclass(eq=False)
class FakeCompleter:
    """Completes as a model would, by arithmetic; see ``testing.fake_text`` for what it says.

    Args:
        n_layers: Blocks.
        hidden: Width of a row.
        dtype: Of the model: ``"bfloat16"`` or ``"float32"``.
        context_tokens: Longest prompt with what is written after it.
        token_seconds: How long each token of a request takes, however many choices it has.
        fault: What goes wrong with every request.
        die_after: The process ends in the middle of the request after so many.
        name: What ``provenance`` calls the model.

    ``requests`` are those that it took, ``steps`` the tokens' worth of time that it spent on them, and ``cancelled``
    how often a caller stopped one, even one that had ended.
    """

    n_layers: int = 4
    hidden: int = 8
    dtype: str = "bfloat16"
    context_tokens: int = 2048
    token_seconds: float = 0.0
    fault: Fault | None = None
    die_after: int | None = None
    name: str = "fake"
    requests: list[CompletionRequest] = field(default_factory=list)
    cancelled: int = 0
    steps: int = 0

    def __post_init__(self) -> None:
        """Make what it is built on."""
        self.rows_engine = FakeEngine(
            n_layers=self.n_layers,
            hidden=self.hidden,
            dtype=self.dtype,
            context_tokens=self.context_tokens,
            named={"model": self.name},
        )
        self._lock = threading.Lock()
        self._running: set[_Run] = set()
        self._closed = False

    @property
    def provenance(self) -> Provenance:
        """What the rows come from."""
        return self.rows_engine.provenance

    @property
    def tokenizer(self) -> PromptTokenizer:
        """One token a character."""
        return self.rows_engine.tokenizer

    @property
    def running(self) -> int:
        """Requests that were neither finished nor cancelled."""
        return len(self._running)

    def submit(self, request: CompletionRequest, emit: Emit) -> Cancel:
        """Start ``request`` in a thread of its own; see ``Completes.submit``."""
        prompts = [self._ids(request, index) for index in range(len(request.prompts))]
        self._check_layers(request.capture, request.steering)
        with self._lock:
            if self._closed:
                raise ServerRestarting("the engine is closed; send the request again in a moment.")
            self.requests.append(request)
            run = _Run(self, request, prompts, emit, dies=self._dies(len(self.requests)))
            self._running.add(run)
        threading.Thread(target=run.go, name="fake-completion", daemon=True).start()
        return run.cancel

    def close(self) -> None:
        """Fail what runs, and take nothing more."""
        with self._lock:
            self._closed = True
            left = list(self._running)
        for run in left:
            run.end(Failed(ServerRestarting("the engine stopped before the request was done; send it again.")))

    def _dies(self, number: int) -> bool:
        return self.fault == "die" or (self.die_after is not None and number > self.die_after)

    def _ids(self, request: CompletionRequest, index: int) -> list[int]:
        prompt = request.prompts[index]
        if isinstance(prompt, str):
            encoded = self.tokenizer.tokenizer(prompt, add_special_tokens=request.add_special_tokens)
            prompt = tuple(encoded["input_ids"])
        (tokens,) = self.tokenizer.encode([Prompt(token_ids=prompt)], CaptureSpec(), index)
        if len(prompt) + request.max_tokens > (self.tokenizer.context_length or 0):
            raise PromptTooLong(
                f"prompt {index} has {len(prompt)} tokens, which with max_tokens {request.max_tokens} are more than "
                f"the context of {self.tokenizer.context_length}; shorten either.",
                index=index,
            )
        return [int(token) for token in tokens.token_ids]

    def _check_layers(self, capture: CaptureAsk | None, steering: Sequence[SteeringVector]) -> None:
        asked = [*(capture.layers if capture else ()), *(layer for vector in steering for layer in vector.layers)]
        if wrong := [layer for layer in asked if not 0 <= layer < self.n_layers]:
            raise InvalidLayers(f"there is no layer {wrong[0]}; this model's layers are 0 to {self.n_layers - 1}.")
        if wrong := [vector.vectors.shape[-1] for vector in steering if vector.vectors.shape[-1] != self.hidden]:
            raise InvalidInput(f"a steering vector is {wrong[0]} wide; this model's hidden size is {self.hidden}.")


@dataclass(eq=False)
class _Run:
    """One request; ``lock`` keeps anything from being emitted after the end."""

    engine: FakeCompleter
    request: CompletionRequest
    prompts: Sequence[Sequence[int]]
    emit: Emit
    dies: bool
    lock: threading.Lock = field(default_factory=threading.Lock)
    ended: threading.Event = field(default_factory=threading.Event)

    def go(self) -> None:
        """Write all choices, a token of each at a time."""
        n = self.request.n
        sequences = [
            FakeSequence(prompt * n + sample, self.request, prompt_ids, prompt, sample)
            for prompt, prompt_ids in enumerate(self.prompts)
            for sample in range(n)
        ]
        while not self._waited():
            open_ones = [sequence for sequence in sequences if sequence.finish_reason is None]
            with self.engine._lock:
                self.engine.steps += 1
            for sequence in open_ones:
                self._step(sequence)
            if self.dies:
                self._waited()  # so that what was streamed gets out
                os._exit(_DEAD)
            if all(sequence.finish_reason for sequence in sequences):
                self.end(self._outcome(sequences))

    def cancel(self) -> None:
        """Stop; nothing is emitted once this returned."""
        with self.engine._lock:
            self.engine.cancelled += 1
        self.end(None)

    def end(self, event: Event | None) -> None:
        """Emit the last event, unless it has ended before."""
        with self.lock:
            if self.ended.is_set():
                return
            self.ended.set()
            with self.engine._lock:
                self.engine._running.discard(self)
            if event is not None:
                self.emit(event)

    def _waited(self) -> bool:
        """Whether it ended meanwhile."""
        return self.ended.wait(self.engine.token_seconds) if self.engine.token_seconds else self.ended.is_set()

    def _step(self, sequence: FakeSequence) -> None:
        delta = sequence.step()
        with self.lock:
            if self.request.stream and not self.ended.is_set():
                self.emit(delta)

    def _outcome(self, sequences: Sequence[FakeSequence]) -> Event:
        if self.engine.fault == "error":
            return Failed(StreamtapError("the fake engine was told to fail."))
        choices = tuple(self._choice(sequence) for sequence in sequences)
        prompt_tokens = sum(len(ids) for ids in self.prompts)
        return Finished(choices, Usage(prompt_tokens, sum(len(choice.token_ids) for choice in choices)))

    def _choice(self, sequence: FakeSequence) -> Choice:
        rows, engine = None, self.engine
        if self.request.capture is not None:
            ask, steering = self.request.capture, self.request.steering
            rows = captured(engine.rows_engine, ask, steering, sequence.prompt_ids, sequence.new_ids)
            if engine.fault in get_args(RowsFault):
                rows = broken(rows, engine.fault)  # type: ignore[arg-type]  # its values are those
        return sequence.choice(rows)
