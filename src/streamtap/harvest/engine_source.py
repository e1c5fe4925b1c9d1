"""``EngineSource``: how a process elsewhere comes by its engine; it travels there, so it holds no weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from streamtap.engines.base import Engine
from streamtap.engines.opening import load_engine


class EngineSource(Protocol):
    """Opens an engine of one model where it is called: any kind of engine, the same model each time."""

    def open(self) -> Engine:
        """The engine, ready to run; whoever opened it closes it."""
        ...


@dataclass(frozen=True)
class ModelSource:
    """A model by name; ``options`` are those of ``load_engine``, such as ``backend``, and of the backend's own engine.

    ``{"backend": "vllm", "tensor_parallel_size": 4}`` is a model on vLLM, over four of the machine's GPUs. A folder or
    file that ``model`` names must be there on every machine, and so must the libraries.
    """

    model: str = "demo"
    options: Mapping[str, Any] = field(default_factory=dict)

    def open(self) -> Engine:
        """Load it into this process.

        Raises:
            InvalidInput: no such model on this machine, or an option that means nothing.
            MissingExtra: what the backend needs is not installed here.
        """
        engine: Engine = load_engine(self.model, **self.options)
        return engine
