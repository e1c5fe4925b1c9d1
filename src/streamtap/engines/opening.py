"""Open an engine by the name of its model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamtap.engines.transformers import TransformersEngine


def load_engine(model: str = "demo", **options: Any) -> TransformersEngine:
    """An engine in this process for ``model``: ``"demo"``, a local folder, a GGUF file, or a Hub id.

    ``options`` are those of ``TransformersEngine.load``: ``revision``, ``dtype``, ``device``, ….

    Raises:
        InvalidInput: no such model, or an option that means nothing.
        MissingExtra: torch and transformers are not installed.
    """
    from streamtap.engines.transformers import TransformersEngine

    return TransformersEngine.load(model, **options)
