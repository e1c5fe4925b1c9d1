"""Load a model into this process, stage by stage; torch is imported here and no sooner."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from streamtap.completion import CaptureAsk, CompletionRequest, Delta, Event, Failed, Sampling
from streamtap.engines.base import Completes
from streamtap.engines.worker.stages import Enter


@dataclass(frozen=True)
class ModelOptions:
    """What to load, and how; ``max_model_len`` lowers the context, in tokens."""

    model: str
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    max_batch_tokens: int | None = None

    def load(self, enter: Enter) -> Completes:
        """The engine, loaded and warm.

        Raises:
            StreamtapError: the model cannot be loaded, or its first pass failed.
        """
        enter("loading_weights")
        from streamtap.engines.transformers import TransformersEngine

        engine: Completes = TransformersEngine.load(
            self.model,
            revision=self.revision,
            dtype=self.dtype,
            device=self.device,
            max_batch_tokens=self.max_batch_tokens,
        )
        lower_context(engine, self.max_model_len)
        enter("warming_up")
        warm_up(engine)
        return engine


def lower_context(engine: Completes, max_model_len: int | None) -> None:
    """Let the engine take no more than ``max_model_len`` tokens, prompt and completion together."""
    if max_model_len is not None:
        own = engine.tokenizer.context_length
        engine.tokenizer.context_length = max_model_len if own is None else min(own, max_model_len)


def warm_up(engine: Completes) -> None:
    """Run one small request, so that the first caller does not wait for what libraries do once.

    Raises:
        StreamtapError: it failed.
    """
    last: list[Event] = []
    done = threading.Event()

    def emit(event: Event) -> None:
        if not isinstance(event, Delta):
            last.append(event)
            done.set()

    request = CompletionRequest(
        prompts=((0,),), max_tokens=2, sampling=Sampling(temperature=0), capture=CaptureAsk(layers=(0,))
    )
    engine.submit(request, emit)
    done.wait()
    if isinstance(last[0], Failed):
        raise last[0].error
