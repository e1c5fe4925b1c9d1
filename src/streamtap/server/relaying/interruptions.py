"""Whether a vLLM interrupted a request while it captured one.

Where memory for keys and values runs out, vLLM takes a running request's away and runs it again from its beginning
later. vllm-lens then has rows of the first positions a second time, and gives them for those behind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from streamtap.errors import CaptureInterrupted, Unsupported
from streamtap.server.pool.endpoint import Endpoint
from streamtap.server.relaying.upstream import Upstream


@dataclass(frozen=True)
class Interruptions:
    """How many there were when a capture of ``layer`` began."""

    upstream: Upstream
    endpoint: Endpoint
    layer: int
    before: float

    @classmethod
    async def so_far(cls, upstream: Upstream, endpoint: Endpoint, layer: int) -> Self:
        """Ask the engine for them.

        Raises:
            Unsupported: it does not tell, so that nobody could say whether the rows are right.
        """
        before = await upstream.preemptions(endpoint)
        if before is None:
            raise Unsupported(
                "this model's engine (vLLM) does not tell how often it interrupted a request, without which wrong rows "
                "would go unseen; have it run with /metrics and without --disable-log-stats, or ask another model."
            )
        return cls(upstream, endpoint, layer, before)

    async def check(self) -> None:
        """Refuse what was captured if there was another since.

        Raises:
            CaptureInterrupted: there was, of this request or of one beside it.
        """
        if await self.upstream.preemptions(self.endpoint) != self.before:
            raise CaptureInterrupted(
                "the model's engine (vLLM) ran out of memory for keys and values and interrupted a request, perhaps "
                "this one, whose rows would then be of other positions; send it again, with fewer beside it.",
                layer=self.layer,
            )
