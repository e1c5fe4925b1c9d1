"""Whether a vLLM interrupted a request while it captured one.

Where memory for keys and values runs out, vLLM takes a running request's away and runs it again from its beginning
later. vllm-lens then has rows of the first positions a second time, and gives them for those behind.
"""

from __future__ import annotations

from dataclasses import dataclass

from streamtap.errors import CaptureMissed
from streamtap.server.pool.endpoint import Endpoint
from streamtap.server.relaying.upstream import Upstream


@dataclass(frozen=True)
class Interruptions:
    """How many there were when a capture of ``layer`` began; None is not known, or of no account."""

    upstream: Upstream
    endpoint: Endpoint
    layer: int
    before: float | None

    async def check(self) -> None:
        """Refuse what was captured if there was another since.

        Raises:
            CaptureMissed: there was, of this request or of one beside it.
        """
        if self.before is not None and await self.upstream.preemptions(self.endpoint) != self.before:
            raise CaptureMissed(
                "the model's engine (vLLM) ran out of memory for keys and values and interrupted a request, perhaps "
                "this one, whose rows would then be of other positions; send it again, with fewer beside it.",
                layer=self.layer,
            )
