"""What of a model changes its activations."""

from __future__ import annotations

from typing import Any

from streamtap.activations import Provenance

# Raised when the same request gets other values than before; rows from then are not served any more.
_VALUES_VERSION = 1


def identity_of(provenance: Provenance) -> dict[str, Any]:
    """What of a provenance changes an activation: ARCHITECTURE's law 2, without what only tells who ran it."""
    return {
        "values": _VALUES_VERSION,
        "model": provenance.commit,
        "tokenizer": provenance.tokenizer,
        "dtype": provenance.dtype,
        "quantization": provenance.quantization,
        "engine": provenance.engine,
    }
