"""Reads a safetensors file that lies in memory, as views."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from streamtap.errors import EngineFailed, InvalidInput
from streamtap.tensor_file import read_tensors


def read_file(raw: bytes) -> tuple[dict[str, str], dict[str, NDArray[Any]]]:
    """Metadata and tensors of a file; the tensors are views into ``raw``.

    Raises:
        EngineFailed: it is no safetensors file of ours, or was cut short.
    """
    try:
        tensors, metadata = read_tensors(raw, "the answer")
    except InvalidInput as error:
        raise EngineFailed("the server's answer is not a safetensors file, or was cut short.") from error
    return metadata, tensors
