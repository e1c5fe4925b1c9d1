"""The parts of one gateway, together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from streamtap.server.admission import Admission
from streamtap.server.clock import Clock
from streamtap.server.config import ServerConfig
from streamtap.server.harvests.asking import Asking
from streamtap.server.metrics import Metrics
from streamtap.server.models.catalog import Catalog
from streamtap.server.relaying.upstream import Upstream
from streamtap.server.stopping import Stopping

if TYPE_CHECKING:
    from streamtap.server.pool.pool import Pool

#: A body of more bytes is read and counted on another thread, so that the others need not wait for it.
_LARGE_BYTES = 32 * 1024
_Result = TypeVar("_Result")


def _readers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2, thread_name_prefix="streamtap-reading")


@dataclass(frozen=True)
class Service:
    """What every route needs."""

    config: ServerConfig
    admission: Admission
    pool: Pool
    catalog: Catalog
    clock: Clock
    upstream: Upstream
    stopping: Stopping
    metrics: Metrics
    harvests: Asking
    readers: Executor = field(default_factory=_readers)

    async def read(self, body_bytes: int, function: Callable[..., _Result], *args: Any) -> _Result:
        """Run a function over a body of that size, where it holds nobody up."""
        if body_bytes <= _LARGE_BYTES:
            return function(*args)
        return await asyncio.get_running_loop().run_in_executor(self.readers, partial(function, *args))

    def close(self) -> None:
        """Let go of connections and threads."""
        self.upstream.close()
        self.readers.shutdown(wait=False)
