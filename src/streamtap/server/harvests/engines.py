"""The engine of a worker: one at a time, kept from job to job while it is the same model's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from streamtap.activations import Activations, Provenance
from streamtap.engines.base import Engine
from streamtap.engines.tokenizing import PromptTokenizer
from streamtap.server.harvests.orders import HarvestModel
from streamtap.spec import CaptureSpec, PromptLike

Load = Callable[[HarvestModel], Engine]


def load_for_harvest(model: HarvestModel) -> Engine:
    """The model in this process, apart from the engines of completions; torch is imported here and no sooner.

    Raises:
        StreamtapError: it cannot be loaded.
    """
    from streamtap.engines.opening import load_engine

    return load_engine(
        model.checkpoint,
        revision=model.revision,
        dtype=model.dtype,
        device=model.device,
        max_batch_tokens=model.max_batch_tokens,
    )


class LoadedEngine:
    """At most one engine."""

    def __init__(self, load: Load = load_for_harvest) -> None:
        self._load = load
        self._engine: Engine | None = None
        self.model_id: str | None = None

    def of(self, model: HarvestModel) -> Engine:
        """The engine of ``model``; that of another is let go first, for there may not be room for both.

        Raises:
            StreamtapError: it cannot be loaded.
        """
        if self._engine is None or self.model_id != model.id:
            self.close()
            self._engine = ServedEngine(self._load(model), model)
            self.model_id = model.id
        return self._engine

    def close(self) -> None:
        """Let go of the model."""
        engine, self._engine, self.model_id = self._engine, None, None
        if engine is not None:
            engine.close()


class ServedEngine:
    """An engine under the name that clients know; the path of a checkpoint on the server is not theirs to read."""

    def __init__(self, engine: Engine, model: HarvestModel) -> None:
        self._engine = engine
        self._name = model.name
        own = engine.tokenizer.context_length
        # Prompts are cut where the gateway counted them to be.
        engine.tokenizer.context_length = model.context if own is None else min(own, model.context)

    @property
    def provenance(self) -> Provenance:
        """See ``Engine.provenance``."""
        return replace(self._engine.provenance, model=self._name)

    @property
    def tokenizer(self) -> PromptTokenizer:
        """See ``Engine.tokenizer``."""
        return self._engine.tokenizer

    def capture(
        self, prompts: Iterable[PromptLike], spec: CaptureSpec, *, ordered: bool = True
    ) -> Iterator[Activations]:
        """See ``Engine.capture``."""
        return self._engine.capture(prompts, spec, ordered=ordered)

    def close(self) -> None:
        """See ``Engine.close``."""
        self._engine.close()
