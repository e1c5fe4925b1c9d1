"""Tell a model in memory by its weights."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from streamtap.errors import Unsupported
from streamtap.fingerprint import fingerprint


def weights_hash(model: torch.nn.Module) -> str:
    """``"sha256:…"`` of every weight and buffer that is saved, by name, dtype, shape and value.

    Raises:
        Unsupported: some weights are off-loaded, so that they are not there to be read.
    """
    state: dict[str, Any] = {name: value for name, value in model.state_dict().items() if torch.is_tensor(value)}
    away = next((name for name, value in state.items() if value.device.type == "meta"), None)
    if away is not None:
        raise Unsupported(
            f"weight {away} is off-loaded, so this model cannot be told by its weights; give the cache the model's "
            "name instead of an engine."
        )
    with ThreadPoolExecutor() as pool:
        hashes = dict(zip(state, pool.map(_hash, state.values()), strict=True))
    return "sha256:" + fingerprint(hashes)


def _hash(weight: torch.Tensor) -> str:
    flat = weight.detach().cpu().contiguous().reshape(-1)
    values = hashlib.sha256(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"").hexdigest()
    return f"{weight.dtype}{tuple(weight.shape)}{values}"
