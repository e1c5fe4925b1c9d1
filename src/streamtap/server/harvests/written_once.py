"""Small files that several gateways agree on: whoever is first writes them."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path


def written_once(file: Path, data: bytes) -> bytes:
    """What ``file`` holds, which is ``data`` where it was not there; for this user alone, and whole from the start.

    Raises:
        OSError: it cannot be written or read.
    """
    if not file.exists():
        part = file.with_name(f".{secrets.token_hex(16)}")
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as stream:
            try:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
                # Of several that begin at once one wins.
                with suppress(FileExistsError):
                    os.link(part, file)
            finally:
                part.unlink()
    return file.read_bytes()
