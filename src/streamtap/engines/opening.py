"""Open an engine by the name of its model and of what runs it."""

from __future__ import annotations

from inspect import signature
from typing import TYPE_CHECKING, Any, Literal, overload

from streamtap.engines.base import Engine
from streamtap.errors import InvalidInput, Unsupported

if TYPE_CHECKING:
    from streamtap.engines.transformers import TransformersEngine

#: What may run a model; ``backend=`` names one.
BACKENDS = ("local", "nnsight", "vllm", "api")


@overload
def load_engine(model: str = "demo", *, backend: Literal["local"] = "local", **options: Any) -> TransformersEngine: ...
@overload
def load_engine(model: str = "demo", *, backend: str, **options: Any) -> Engine: ...
def load_engine(model: str = "demo", *, backend: str = "local", **options: Any) -> Engine:
    """An engine for ``model``: ``"demo"``, a local folder, a GGUF file, or a Hub id.

    ``backend`` is what runs it: ``"local"``, transformers in this process; ``"nnsight"``, in this process or with
    ``remote=True`` on NDIF; ``"vllm"``, vLLM with vllm-lens in this process; ``"api"``, a running service, where
    ``model`` is the service's id for it. ``options`` are those of the engine's own ``load``: ``TransformersEngine``,
    ``NnsightEngine``, ``VllmEngine``, ``ApiEngine``.

    Raises:
        InvalidInput: no such model or backend, or an option that means nothing to it.
        MissingExtra: what the backend needs is not installed.
    """
    check_backend(backend)
    return _loaded(model, backend, options)


def check_backend(backend: str, *, remote: bool = False) -> None:
    """Refuse a backend that there is not, or ``remote`` where it means nothing.

    Raises:
        InvalidInput: no such backend.
        Unsupported: ``remote`` with any but nnsight's.
    """
    if backend not in BACKENDS:
        raise InvalidInput(f"backend must be one of {', '.join(BACKENDS)}; got {backend!r}.")
    if remote and backend != "nnsight":
        raise Unsupported(f"remote=True runs on NDIF, with backend='nnsight'; backend={backend!r} has no such place.")


def _loaded(model: str, backend: str, options: dict[str, Any]) -> Engine:
    load = _engine_class(backend).load
    taken = signature(load)
    try:
        taken.bind(model, **options)
    except TypeError as error:
        known = [name for name in taken.parameters if name not in ("model", "reference")]
        idle = sorted(set(options) - {*known, "reference"})
        mean = "means" if len(idle) == 1 else "mean"
        raise InvalidInput(
            f"{', '.join(idle)} {mean} nothing to backend={backend!r}; it takes {', '.join(known)}."
        ) from error
    engine: Engine = load(model, **options)
    return engine


def _engine_class(backend: str) -> Any:
    if backend == "nnsight":
        from streamtap.engines.nnsight.engine import NnsightEngine

        return NnsightEngine
    if backend == "vllm":
        from streamtap.engines.vllm_offline import VllmEngine

        return VllmEngine
    if backend == "api":
        from streamtap.engines.api import ApiEngine

        return ApiEngine
    from streamtap.engines.transformers import TransformersEngine

    return TransformersEngine
