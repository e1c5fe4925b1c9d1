"""Writing beside the model: while one batch is written and committed, the next is computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from streamtap.cache.values import PromptKey
from streamtap.cache.writer import PartWriter


class BackgroundWriter:
    """Hands batches to one thread that appends them to ``writer``, which it closes at the end.

    The arrays handed over must not change afterwards. An error of the thread is raised by the
    next ``append``, ``flush`` or ``close``. When the ``with`` body fails, what was handed over
    is still committed.
    """

    def __init__(self, writer: PartWriter) -> None:
        self._writer = writer
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="streamtap-cache")
        self._pending: deque[Future[None]] = deque()

    def __enter__(self) -> Self:
        """Enter the block at whose end everything is committed."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Commit what was handed over; an error of the body goes before one of the thread."""
        if error is None:
            self.close()
            return
        failures = self._end()
        for failure in failures:
            error.add_note(f"A batch was also lost to the cache: {failure}")

    def append(
        self,
        keys: Sequence[PromptKey],
        rows: Mapping[str, NDArray[Any]],
        offsets: NDArray[np.int64],
        token_ids: NDArray[np.int32],
        positions: NDArray[np.int32],
    ) -> None:
        """Hand over a batch (shapes as in ``PartWriter.append``); waits until the one before is committed.

        Raises:
            StreamtapError: an earlier batch failed; this one was not taken.
        """
        while self._pending:
            self._pending.popleft().result()
        self._pending.append(self._thread.submit(self._writer.append, keys, rows, offsets, token_ids, positions))

    def flush(self) -> None:
        """Wait until all that was handed over is committed.

        Raises:
            StreamtapError: a batch failed.
        """
        wait(self._pending)
        while self._pending:
            self._pending.popleft().result()

    def close(self) -> None:
        """``flush``, then end the thread and close the writer; may be called twice.

        Raises:
            StreamtapError: a batch failed; those after it were still written.
        """
        failures = self._end()
        if failures:
            raise failures[0]

    def _end(self) -> list[BaseException]:
        """End the thread when all is written, and say what failed."""
        self._thread.shutdown(wait=True)
        self._writer.close()
        failures = [each.exception() for each in self._pending]
        self._pending.clear()
        return [failure for failure in failures if failure is not None]
