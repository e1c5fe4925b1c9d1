"""What an engine process writes, in a file that does not grow for ever."""

from __future__ import annotations

import os
import shutil
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

MOST_BYTES = 10_000_000


class EngineLog:
    """One engine's log file; the part before the last ``MOST_BYTES`` or so is kept as ``.old``."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def open(self, now: datetime, what: str) -> BinaryIO:
        """The file, to append to, with a line that says when ``what`` began."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self.rotate()
        file = self._path.open("ab", buffering=0)
        file.write(f"==== {now:%Y-%m-%d %H:%M:%S} UTC: {what}\n".encode())
        return file

    def rotate(self) -> None:
        """Move what is there aside if it is long, even while a process writes: it appends, and so begins anew."""
        if self._path.is_file() and self._path.stat().st_size > MOST_BYTES:
            shutil.copyfile(self._path, self._path.with_name(self._path.name + ".old"))
            os.truncate(self._path, 0)
