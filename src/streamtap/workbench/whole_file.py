"""A file that is there in whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_whole(path: str | os.PathLike[str], content: bytes) -> Path:
    """Write ``content`` under another name and rename it to ``path``, making the folder where there is none.

    Raises:
        OSError: the folder cannot be made or written to; what was at ``path`` is untouched.
    """
    with writing_whole(path) as draft:
        draft.write_bytes(content)
    return Path(path)


@contextmanager
def writing_whole(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Another name to write to, which is renamed to ``path`` at the end of the block, or removed after an error.

    Raises:
        OSError: the folder cannot be made or written to; what was at ``path`` is untouched.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        yield draft
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
