"""Extract, cache, share and probe the residual stream of language models.

The public names are loaded on first use: ``import streamtap`` takes a moment and needs
neither torch nor a model.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamtap.activations import Activations, Provenance
    from streamtap.cache.store import CacheStore
    from streamtap.client.aio import AsyncClient
    from streamtap.client.steering import steering_vector
    from streamtap.client.sync import Client
    from streamtap.completion import Completion, CompletionRequest
    from streamtap.dataset.inspection import DatasetInfo
    from streamtap.engines.opening import load_engine
    from streamtap.engines.transformers import TransformersEngine
    from streamtap.errors import StreamtapError
    from streamtap.harvest.stream import ActivationStream
    from streamtap.harvested.reader import HarvestedRun
    from streamtap.probes.scores import Scores
    from streamtap.spec import CaptureSpec, Prompt
    from streamtap.workbench.dataset_rows import load_activations, load_rows
    from streamtap.workbench.dataset_tensors import load_activation_dataset
    from streamtap.workbench.from_harvest import dataset_from_harvest
    from streamtap.workbench.open_dataset import fetch_dataset_metadata
    from streamtap.workbench.probe import Probe
    from streamtap.workbench.publish import push_dataset
    from streamtap.workbench.pull import pull_dataset
    from streamtap.workbench.statements import Statements, load_statements
    from streamtap.workbench.sweep import Sweep, sweep_layers
    from streamtap.workbench.unified_cache import UnifiedCache
    from streamtap.workbench.upgrade import upgrade_dataset_format, verify_dataset
    from streamtap.workbench.warmup_stats import WarmupStats

__version__ = "0.1.0"

__all__ = [
    "ActivationStream",
    "Activations",
    "AsyncClient",
    "CacheStore",
    "CaptureSpec",
    "Client",
    "Completion",
    "CompletionRequest",
    "DatasetInfo",
    "HarvestedRun",
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
    "dataset_from_harvest",
    "fetch_dataset_metadata",
    "load_activation_dataset",
    "load_activations",
    "load_engine",
    "load_rows",
    "load_statements",
    "pull_dataset",
    "push_dataset",
    "steering_vector",
    "sweep_layers",
    "upgrade_dataset_format",
    "verify_dataset",
]

_HOMES = {
    "ActivationStream": "streamtap.harvest.stream",
    "Activations": "streamtap.activations",
    "AsyncClient": "streamtap.client.aio",
    "CacheStore": "streamtap.cache.store",
    "CaptureSpec": "streamtap.spec",
    "Client": "streamtap.client.sync",
    "Completion": "streamtap.completion",
    "CompletionRequest": "streamtap.completion",
    "DatasetInfo": "streamtap.dataset.inspection",
    "HarvestedRun": "streamtap.harvested.reader",
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
    "dataset_from_harvest": "streamtap.workbench.from_harvest",
    "fetch_dataset_metadata": "streamtap.workbench.open_dataset",
    "load_activation_dataset": "streamtap.workbench.dataset_tensors",
    "load_activations": "streamtap.workbench.dataset_rows",
    "load_engine": "streamtap.engines.opening",
    "load_rows": "streamtap.workbench.dataset_rows",
    "load_statements": "streamtap.workbench.statements",
    "pull_dataset": "streamtap.workbench.pull",
    "push_dataset": "streamtap.workbench.publish",
    "steering_vector": "streamtap.client.steering",
    "sweep_layers": "streamtap.workbench.sweep",
    "upgrade_dataset_format": "streamtap.workbench.upgrade",
    "verify_dataset": "streamtap.workbench.upgrade",
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
