"""How much memory this host could give at once, and how much of it the weights of a model take."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from streamtap.engines.references import ModelReference, find_model
from streamtap.errors import StreamtapError
from streamtap.server.config import ModelConfig
from streamtap.settings import Settings

#: The first kind that a folder has is what is loaded.
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")
#: The same weights once more, in one file, beside those that Hugging Face's libraries read.
_TWIN = "consolidated"


@dataclass(frozen=True)
class Memory:
    """Bytes that there are in all, and bytes that could be had at once."""

    total: int
    available: int


class Host(Protocol):
    """What the pool asks of the machine that it runs on."""

    def memory(self) -> Memory | None:
        """What there is now; None where it cannot be known."""
        ...

    async def weights_bytes(self, model: ModelConfig) -> int | None:
        """What the weights of ``model`` take in memory; None where their files are not on this machine."""
        ...


class LocalHost:
    """This machine, as Linux tells of it; a container's limit counts where control groups are of version 2."""

    def __init__(self, proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc = proc
        self._groups = groups

    def memory(self) -> Memory | None:
        """The tightest of the machine's memory and the limits on this process; None on another system than Linux."""
        machine = self._machine()
        return machine and min((machine, *self._limits()), key=lambda memory: memory.available)

    async def weights_bytes(self, model: ModelConfig) -> int | None:
        """Bytes of the files, or twice as many where they are to be widened to float32."""
        return await asyncio.to_thread(_weights_bytes, model)

    def _machine(self) -> Memory | None:
        try:
            lines = (self._proc / "meminfo").read_text(encoding="ascii").splitlines()
            fields = {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}
            total, available = (int(fields[name][0]) * 1024 for name in ("MemTotal", "MemAvailable"))
        except (OSError, ValueError, LookupError):  # it is not Linux, or tells it in another way
            return None
        return Memory(total, available)

    def _limits(self) -> Iterator[Memory]:
        """Each limit on a control group that this process is in, and what is left of it."""
        try:
            lines = (self._proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
        except OSError:
            return
        own = next((line.removeprefix("0::").strip("/") for line in lines if line.startswith("0::")), None)
        if own is None:
            return
        group = self._groups / own
        for folder in (group, *group.parents):
            if folder.is_relative_to(self._groups) and (limit := _limit_of(folder)) is not None:
                yield limit


def _limit_of(group: Path) -> Memory | None:
    try:
        limit = int((group / "memory.max").read_text(encoding="ascii"))
        used = int((group / "memory.current").read_text(encoding="ascii"))
        lines = (group / "memory.stat").read_text(encoding="ascii").splitlines()
        stat = {name: int(count) for name, _, count in (line.partition(" ") for line in lines)}
    except (OSError, ValueError):  # there is no limit, which the file calls "max"
        return None
    # What was read of files is counted as used, and goes as soon as somebody needs the room.
    return Memory(limit, max(0, limit - used + stat.get("inactive_file", 0)))


def _weights_bytes(model: ModelConfig) -> int | None:
    try:
        # The hash of the weights is of no use here, and reading them takes long.
        found = find_model(
            model.checkpoint,
            model.revision,
            settings=Settings.from_environment(),
            recall=lambda _key: {"commit": "sha256:"},
        )
        stored = sum(file.stat().st_size for file in _weights_files(found))
    except (OSError, StreamtapError):
        return None
    return stored * (2 if model.dtype == "float32" else 1) or None


def _weights_files(found: ModelReference) -> list[Path]:
    if found.folder is None:
        return []
    if found.gguf is not None:
        return [found.folder / found.gguf]
    files = next((files for kind in _WEIGHTS if (files := list(found.folder.glob(kind)))), [])
    return [file for file in files if not file.name.startswith(_TWIN)] or files
