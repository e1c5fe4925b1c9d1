"""One ``vllm.LLM`` with vllm-lens, called by one thread at a time; every call leaves it as it was."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from typing import Any

from streamtap.errors import EngineDead, EngineFailed, InvalidInput

#: How long its processes may take to end: theirs have five seconds each, one after the other.
GRACE_SECONDS = 20.0
#: How often to look whether they are still there.
_LOOK_SECONDS = 1.0
#: Sees what each step gave, with its place among the prompts, and says whether to go on.
Watch = Callable[[Sequence[tuple[int, Any]]], bool]


@dataclass(frozen=True)
class LlmFacts:
    """What vLLM made of a model and of the options that it was opened with.

    ``context`` is how many tokens prompt and answer may have together; ``step_tokens`` the most in one pass, beyond
    which a prompt runs in pieces; ``held_tokens`` what keys and values of all that runs have room for, in blocks of
    ``block_tokens``; ``most_logprobs`` how many may be listed beside a token, -1 for all.
    """

    version: str
    dtype: str
    device: str
    quantization: str | None
    context: int
    step_tokens: int
    held_tokens: int
    block_tokens: int
    most_logprobs: int

    def held_by(self, tokens: int) -> int:
        """What a sequence of so many tokens takes of ``held_tokens``, with the one that is drawn after it."""
        return -(-(tokens + 1) // self.block_tokens) * self.block_tokens


class Llm:
    """The library's object behind a lock.

    Args:
        llm: A ``vllm.LLM`` in a process that has loaded vllm-lens; it is this object's from here on.
        vllm: The library's module.
        dead: The error that says that its processes are gone.
    """

    def __init__(self, llm: Any, vllm: Any, dead: type[BaseException]) -> None:
        self._llm, self._vllm, self._dead = llm, vllm, dead
        self._lock = threading.Lock()
        self._thread = ThreadPool(1)
        self._closed = False
        self._steps = _Steps(llm.llm_engine, vllm.sampling_params.RequestOutputKind.CUMULATIVE)
        llm.llm_engine = self._steps

    def params(self, **values: Any) -> Any:
        """``SamplingParams``. A call changes them, so each sequence needs its own."""
        return self._vllm.SamplingParams(**values)

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[Any], watch: Watch | None = None
    ) -> list[Any]:
        """Run token ids; each one's ``RequestOutput`` in their order, or none at all once ``watch`` said to stop.

        With ``watch`` every step tells of text that is on its way, without it of what is finished.

        Raises:
            InvalidInput: the engine is closed, or vLLM takes no such request.
            EngineFailed: vLLM failed; ``EngineDead`` where its processes are gone.
        """
        given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        with self._lock:
            if self._closed:
                raise InvalidInput("this engine is closed, so its model is gone; load it again.")
            with _Cleared(self._dead, self._sweep, lambda: not self._steps.begun), self._steps.watched(watch):
                outputs = self._ran(lambda: self._llm.generate(given, list(params), use_tqdm=False))
                if self._steps.stopped:
                    self._sweep()
                    return []
        if [list(output.prompt_token_ids) for output in outputs] != [each["prompt_token_ids"] for each in given]:
            raise EngineFailed(f"vLLM's {len(outputs)} answers are not those of the {len(given)} prompts that it got.")
        return outputs

    def close(self) -> None:
        """End vLLM's processes, once what runs is over."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._steps.shut_down()
                self._thread.close()

    def _ran(self, call: Callable[[], list[Any]]) -> list[Any]:
        """What ``call`` gives, made in another thread: vLLM waits for ever where its processes were killed."""
        result = self._thread.apply_async(call)
        try:
            while True:
                result.wait(_LOOK_SECONDS)
                if result.ready():
                    return result.get()
                if self._steps.dead:
                    raise self._dead
        except BaseException:  # a key press, too, while the call goes on
            if not self._steps.dead:
                self._steps.stop()
                result.wait(GRACE_SECONDS)
            raise

    def _sweep(self) -> None:
        """Stop what a call left running. Its rows would stay with vLLM's workers, its answers go to the next call."""
        with _Cleared(self._dead, lambda: None, lambda: False):
            for request_id in self._steps.stop_all():
                self._llm.collective_rpc("clear_captured_states", args=(request_id,))


class _Cleared:
    """Around a call: what it raises becomes one of our errors, after ``sweep`` unless there is nothing left to sweep.

    A ``ValueError`` refuses the request only where ``is_adding`` says that it came of adding it. No ``except``, since a
    worker's errors come as plain ``Exception``.
    """

    def __init__(self, dead: type[BaseException], sweep: Callable[[], None], is_adding: Callable[[], bool]) -> None:
        self._dead, self._sweep, self._is_adding = dead, sweep, is_adding

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: Any, error: BaseException | None, _trace: Any) -> None:
        if error is None:
            return
        if isinstance(error, self._dead):
            raise EngineDead("vLLM's processes ended; its log says why. Load the model again.") from error
        self._sweep()
        # Its words may hold anything of the prompt, so they stay in the error that caused this one.
        if isinstance(error, ValueError) and self._is_adding():
            raise InvalidInput(f"vLLM does not take this request ({type(error).__name__}).") from error
        if isinstance(error, Exception):
            raise EngineFailed(f"vLLM failed with {type(error).__name__}; its log says where.") from error


class _Steps:
    """Stands before the engine inside ``LLM``: sees the requests that a call adds, and what each step gives of them.

    ``LLM.generate`` by itself tells of nothing before all is done, and cannot be stopped.
    """

    def __init__(self, engine: Any, cumulative: Any) -> None:
        self._engine, self._cumulative = engine, cumulative
        self._watch: Watch | None = None
        self._told_to_stop = False
        self._places: dict[str, int] = {}
        self._open: dict[str, str] = {}
        self.stopped = False
        #: Whether the call's requests were all added, and run.
        self.begun = False

    def __getattr__(self, name: str) -> Any:
        """All else is the engine's."""
        return getattr(self._engine, name)

    @property
    def dead(self) -> bool:
        """Whether the engine's processes are known to be gone."""
        resources = getattr(self._engine.engine_core, "resources", None)
        return bool(getattr(resources, "engine_dead", False))

    def stop(self) -> None:
        """Stop the call's requests at the next step."""
        self._told_to_stop = True

    @contextmanager
    def watched(self, watch: Watch | None) -> Iterator[None]:
        """Let ``watch`` see the steps inside the ``with``."""
        self._watch, self._places, self._open = watch, {}, {}
        self.stopped = self._told_to_stop = self.begun = False
        try:
            yield
        finally:
            self._watch = None

    def add_request(self, request_id: str, prompt: Any, params: Any, **more: Any) -> Any:
        """As the engine's; the id that it gives is its own for the request."""
        if self._watch is not None:
            params.output_kind = self._cumulative
        own = self._engine.add_request(request_id, prompt, params, **more)
        self._places[request_id] = len(self._places)
        self._open[request_id] = own
        return own

    def step(self) -> Any:
        """As the engine's; stops the call's requests where ``watch`` says so."""
        self.begun = True
        outputs = self._engine.step()
        for output in outputs:
            if output.finished:
                self._open.pop(output.request_id, None)
        if not self.stopped and not self._goes_on(outputs):
            self.stopped = True
            self._abort()
        return outputs

    def stop_all(self) -> list[str]:
        """Stop what the call still has running; the ids of all its requests, for those that are done have rows, too."""
        self._abort()
        self._open = {}
        return list(self._places)

    def shut_down(self) -> None:
        """End the engine's processes."""
        self._engine.engine_core.shutdown(timeout=GRACE_SECONDS)

    def _goes_on(self, outputs: Sequence[Any]) -> bool:
        if self._watch is None or self._told_to_stop:
            return not self._told_to_stop
        places = self._places
        return self._watch([(places[each.request_id], each) for each in outputs if each.request_id in places])

    def _abort(self) -> None:
        if self._open:
            self._engine.abort_request(list(self._open.values()), internal=True)
