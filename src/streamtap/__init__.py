"""Extract, cache and probe the residual stream of language models.

The public names are loaded on first use: ``import streamtap`` takes a moment and needs
neither torch nor a model.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamtap.activations import Activations, Provenance
    from streamtap.cache.store import CacheStore
    from streamtap.engines.transformers import TransformersEngine
    from streamtap.errors import StreamtapError
    from streamtap.probes.scores import Scores
    from streamtap.spec import CaptureSpec, Prompt
    from streamtap.workbench.probe import Probe
    from streamtap.workbench.statements import Statements, load_statements
    from streamtap.workbench.sweep import Sweep, sweep_layers
    from streamtap.workbench.unified_cache import UnifiedCache
    from streamtap.workbench.warmup_stats import WarmupStats

__version__ = "0.1.0"

__all__ = [
    "Activations",
    "CacheStore",
    "CaptureSpec",
    "Probe",
    "Prompt",
    "Provenance",
    "Scores",
    "Statements",
    "StreamtapError",
    "Sweep",
    "TransformersEngine",
    "UnifiedCache",
    "WarmupStats",
    "__version__",
    "load_statements",
    "sweep_layers",
]

_HOMES = {
    "Activations": "streamtap.activations",
    "CacheStore": "streamtap.cache.store",
    "CaptureSpec": "streamtap.spec",
    "Probe": "streamtap.workbench.probe",
    "Prompt": "streamtap.spec",
    "Provenance": "streamtap.activations",
    "Scores": "streamtap.probes.scores",
    "Statements": "streamtap.workbench.statements",
    "StreamtapError": "streamtap.errors",
    "Sweep": "streamtap.workbench.sweep",
    "TransformersEngine": "streamtap.engines.transformers",
    "UnifiedCache": "streamtap.workbench.unified_cache",
    "WarmupStats": "streamtap.workbench.warmup_stats",
    "load_statements": "streamtap.workbench.statements",
    "sweep_layers": "streamtap.workbench.sweep",
}


def __getattr__(name: str) -> Any:
    """Load a public name from its module on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'streamtap' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
