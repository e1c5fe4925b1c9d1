"""A started server to measure: its address, key, and the processes that belong to it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

START_SECONDS = 120.0


@dataclass(frozen=True)
class Served:
    """Where a server answers."""

    base: str
    key: str
    process: subprocess.Popen[str] = field(repr=False)

    @property
    def environ(self) -> Mapping[str, str]:
        """What a client reads."""
        return {"STREAMTAP_API_BASE": self.base, "STREAMTAP_API_KEY": self.key}

    def memory_bytes(self) -> dict[str, int]:
        """Resident memory of the gateway and of the largest process below it."""
        below = [resident_bytes(pid) for pid in _descendants(self.process.pid)]
        return {"gateway": resident_bytes(self.process.pid), "worker": max(below, default=0)}


@contextmanager
def served(config: str, folder: Path) -> Iterator[Served]:
    """``streamtap serve`` with ``config`` until the end of the ``with``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "streamtap.toml").write_text(config)
    command = [sys.executable, "-m", "streamtap", "serve", "--port", "0", "--data-dir", str(folder / "data")]
    with (folder / "gateway.log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        yield _address_of(process)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def resident_bytes(pid: int) -> int:
    """Resident memory of a process, 0 once it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _address_of(process: subprocess.Popen[str]) -> Served:
    base = key = None
    deadline = time.monotonic() + START_SECONDS
    while (base is None or key is None) and time.monotonic() < deadline:
        line = process.stdout.readline() if process.stdout else ""
        if not line:
            break
        base = base or _found(r"ACS_API_BASE=(\S+)", line)
        key = key or _found(r"ACS_API_KEY=(\S+)", line)
    if base is None or key is None:
        raise SystemExit("the server did not say where it answers; see gateway.log")
    return Served(base, key, process)


def _found(pattern: str, line: str) -> str | None:
    match = re.search(pattern, line)
    return match[1] if match else None


def _descendants(pid: int) -> list[int]:
    found, open_ = [], [pid]
    while open_:
        parent = open_.pop()
        children = Path(f"/proc/{parent}/task/{parent}/children")
        mine = [int(each) for each in children.read_text().split()] if children.exists() else []
        found += mine
        open_ += mine
    return found
