"""Holds an answer back until its last value was looked at: in memory while it is small, else in an unnamed file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import SpooledTemporaryFile

#: Most that is held in memory.
_MEMORY_BYTES = 4 * 1024 * 1024
#: What is read in one go.
_PIECE_BYTES = 256 * 1024


async def held_back(pieces: AsyncIterator[bytes], folder: Path) -> AsyncGenerator[bytes, None]:
    """``pieces`` once all of them are there; what they raise is raised before the first, and ``folder`` has their file.

    Raises:
        OSError: the file cannot be written, or not be read.
    """
    # One thread does what touches the file, in order: nothing of it in the loop, and no write is cut off by the end.
    thread = ThreadPoolExecutor(1, thread_name_prefix="streamtap-held-back")
    run = partial(asyncio.get_running_loop().run_in_executor, thread)
    file = SpooledTemporaryFile(_MEMORY_BYTES, dir=str(folder))  # noqa: SIM115 - closed by the thread
    try:
        async for piece in pieces:
            await run(file.write, piece)
        await run(file.seek, 0)
        while piece := await run(file.read, _PIECE_BYTES):
            yield piece
    finally:
        thread.submit(file.close)
        thread.shutdown(wait=False)
