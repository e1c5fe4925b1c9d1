"""The model of a dataset: what whoever wrote the dataset recorded of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamtap.activations import Provenance
from streamtap.dataset.reader import Dataset
from streamtap.errors import DatasetDamaged
from streamtap.pooling import check_pooling
from streamtap.positions import from_canonical
from streamtap.spec import CaptureSpec
from streamtap.workbench.wanted import row_identity

_LIMITS = {"context_length", "vocabulary", "special_ids"}
_FIELDS = {field.name for field in fields(Provenance)}


def provenance_of(dataset: Dataset) -> Provenance:
    """Where the rows come from, as far as it is recorded."""
    recorded = recorded_provenance(dataset)
    if recorded is not None:
        return recorded
    manifest, hidden = dataset.manifest, dataset.manifest.hidden
    return Provenance(
        model=manifest.model,
        commit=manifest.commit or "",
        tokenizer="",
        dtype="" if hidden is None else hidden.dtype,
        # What others call a backend is none of our engines: rows of two of theirs are not told apart.
        engine="",
        engine_version=str(manifest.provenance.get("extraction_backend", "")),
        n_layers=0 if hidden is None else max(hidden.layers) + 1,
        hidden=0 if hidden is None else hidden.width,
    )


def recorded_provenance(dataset: Dataset) -> Provenance | None:
    """The whole provenance as we write it; None where it is not there, or another version wrote it in another form."""
    said = dataset.manifest.capture.get("provenance")
    return Provenance(**said) if isinstance(said, Mapping) and set(said) == _FIELDS else None


def recorded_spec(dataset: Dataset) -> CaptureSpec | None:
    """How the rows were taken; None where that is not recorded, or this version makes them otherwise.

    Raises:
        DatasetDamaged: what is recorded means nothing.
    """
    said, provenance = dataset.manifest.capture.get("identity"), recorded_provenance(dataset)
    if not isinstance(said, Mapping) or provenance is None:
        return None
    try:
        spec = CaptureSpec(
            layers=(),
            positions=from_canonical(said["positions"]),
            pooling=check_pooling(said["pooling"]),
            exclude_special_tokens=bool(said["exclude_special_tokens"]),
            exact=bool(said["exact"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DatasetDamaged(f"what {dataset.source.name} records of its rows' identity means nothing.") from error
    return spec if row_identity(provenance, spec) == dict(said) else None


def recorded_depth(dataset: Dataset) -> int | None:
    """The number of the model's blocks, None where it is not recorded."""
    recorded = recorded_provenance(dataset)
    return (recorded.n_layers or None) if recorded is not None else None


def recorded_limits(dataset: Dataset) -> dict[str, Any] | None:
    """What tokenising depended on beside the tokenizer's files, None where it is not recorded."""
    said = dataset.manifest.capture.get("limits")
    return dict(said) if isinstance(said, Mapping) and {*said} >= _LIMITS else None


def special_ids(dataset: Dataset) -> NDArray[np.int32]:
    """Token ids that count as special, int32; none where they are not recorded."""
    return np.asarray((recorded_limits(dataset) or {}).get("special_ids", []), np.int32)
