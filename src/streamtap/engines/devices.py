"""Which devices this machine has for a model to run on."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Device:
    """A device by the name that ``device=`` takes, what it is, and its memory where that is known."""

    name: str
    title: str
    memory_bytes: int | None


def find_devices() -> list[Device]:
    """The accelerators that torch sees, then the processor; the processor alone without torch."""
    return [*_accelerators(), Device("cpu", platform.machine() or "processor", _main_memory_bytes())]


def _accelerators() -> list[Device]:
    try:
        import torch
    except ImportError:
        return []
    found = []
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        found.append(Device(f"cuda:{number}", properties.name, properties.total_memory))
    if torch.backends.mps.is_available():
        found.append(Device("mps", "Apple GPU", torch.mps.recommended_max_memory()))
    return found


def _main_memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on Windows
        return None
