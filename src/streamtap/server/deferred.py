"""A reservation that nothing can refuse, made only for requests that last: a short one is charged at its end alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

#: After so many seconds a request is one that lasts.
_LASTS_SECONDS = 0.05


class Deferred:
    """Calls ``reserve`` a moment later, unless the request is over by then.

    What comes of it shows at the settlement, which charges in full what was not reserved.
    """

    def __init__(self, reserve: Callable[[], Awaitable[Any]]) -> None:
        self._reserve = reserve
        self._making: asyncio.Future[Any] | None = None
        self._timer = asyncio.get_running_loop().call_later(_LASTS_SECONDS, self._begin)

    async def end(self) -> None:
        """Return once it was made, or will not be."""
        self._timer.cancel()
        if self._making is not None:
            await asyncio.wait([self._making])
            if not self._making.cancelled():
                # A settlement meets what went wrong here too, and says so.
                self._making.exception()

    def _begin(self) -> None:
        self._making = asyncio.ensure_future(self._reserve())
