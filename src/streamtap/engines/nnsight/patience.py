"""Asking again: later and later where the way to a server fails, at once where Python lost count."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from streamtap.errors import EngineFailed, TransferFailed

T = TypeVar("T")

_LOG = logging.getLogger(__name__)
_FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS = 1.0, 60.0
# Before 3.12 two threads that parse at the same time share one count of the depth; formatting an error parses, too.
_LOST_COUNT, _PARSES = "AST constructor recursion depth mismatch", 50


@dataclass(frozen=True)
class Patience:
    """Asks up to ``retries`` times more; ``pause`` waits for so many seconds, twice as long each time."""

    retries: int = 4
    pause: Callable[[float], None] = field(default=time.sleep, repr=False)

    def asking(self, ask: Callable[[], T]) -> T:
        """What ``ask`` gives, as soon as it gives something.

        Raises:
            TransferFailed: the way there failed each time.
            EngineFailed: the job did.
        """
        for asked in range(self.retries):
            try:
                return ask()
            except (TransferFailed, EngineFailed) as error:
                if not error.retryable:
                    raise
                wait = min(_FIRST_WAIT_SECONDS * 2.0**asked, _LONGEST_WAIT_SECONDS)
                _LOG.warning("%s; asking again in %.0f s, %d of %d", error, wait, asked + 1, self.retries)
            self.pause(wait)
        return ask()


def unmiscounted(ask: Callable[[], T]) -> T:
    """What ``ask`` gives, which parses source: once more where another thread parsed meanwhile and Python lost count.

    The fault is CPython's: https://github.com/python/cpython/issues/106905.
    """
    for _ in range(_PARSES - 1):
        try:
            return ask()
        except SystemError as error:
            if _LOST_COUNT not in str(error):
                raise
    return ask()
