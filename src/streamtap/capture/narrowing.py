"""What leaves the device of a row: the whole row or its products with a few directions, in the dtype asked for."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Narrowing:
    """Turns rows [..., hidden] into [..., directions] or into another dtype, where they are.

    Args:
        dtype: ``"bfloat16"``, ``"float32"``, or None for the model's own.
        directions: float32 [directions, hidden], or None for whole rows; products are taken and given in float32.
    """

    def __init__(self, dtype: str | None, directions: NDArray[Any] | None) -> None:
        self._dtype = None if dtype is None else _DTYPES[dtype]
        self._directions = None if directions is None else torch.from_numpy(directions).T.contiguous()
        self._on: dict[torch.device, torch.Tensor] = {}

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """The narrow rows."""
        if self._directions is not None:
            return rows.to(torch.float32) @ self._there(rows.device)
        return rows if self._dtype is None else rows.to(self._dtype)

    def _there(self, device: torch.device) -> torch.Tensor:
        assert self._directions is not None
        if device not in self._on:
            self._on[device] = self._directions.to(device)
        return self._on[device]
