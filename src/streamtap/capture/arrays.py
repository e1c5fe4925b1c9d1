"""Tensors of a device to arrays of the host, in the dtype they have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import torch
from numpy.typing import NDArray


def stack_on_host(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors of one shape as one [n, …] on the CPU, in one copy where they share a device."""
    if len({tensor.device for tensor in tensors}) > 1:
        tensors = [tensor.cpu() for tensor in tensors]
    return torch.stack(list(tensors)).cpu()


def to_numpy(tensor: torch.Tensor) -> NDArray[Any]:
    """A CPU tensor as an array over the same memory; bfloat16 becomes ``ml_dtypes.bfloat16``."""
    dense = tensor.detach().cpu().contiguous()
    if dense.dtype == torch.bfloat16:
        return dense.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return dense.numpy()


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` as ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")
