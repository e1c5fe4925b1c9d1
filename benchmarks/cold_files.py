"""Files that the page cache has forgotten, so that what is timed is the disk."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Sequence
from pathlib import Path

_BLOCK_BYTES = 4 << 20
# Pages that a core has just taken up are kept for a moment.
_TRIES, _PAUSE_SECONDS = 20, 0.1


def forget(files: Sequence[Path]) -> None:
    """Drop the pages of ``files``; ends the program where the kernel keeps them."""
    gc.collect()
    kept = list(files)
    for _ in range(_TRIES):
        for file in kept:
            with file.open("rb", buffering=0) as stream:
                os.fsync(stream.fileno())
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if not (kept := [file for file in kept if _in_memory(file)]):
            return
        time.sleep(_PAUSE_SECONDS)
    raise SystemExit(f"{len(kept)} of {len(files)} files stay in the page cache, {kept[0].name} first.")


def read_through(files: Sequence[Path]) -> None:
    """Read each from its beginning to its end."""
    buffer = bytearray(_BLOCK_BYTES)
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def _in_memory(file: Path) -> bool:
    """Whether the middle of a file can be read without waiting for the disk."""
    with file.open("rb", buffering=0) as stream:
        try:
            return os.preadv(stream.fileno(), [bytearray(1)], file.stat().st_size // 2, os.RWF_NOWAIT) == 1
        except BlockingIOError:
            return False
