"""One request's way through an engine: the slot, the lease, the call, and the answer on its way back."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass

from streamtap.completion import Usage
from streamtap.engines.vllm import to_dialect
from streamtap.errors import EngineFailed, EngineUnreachable, InvalidInput, StreamtapError, Unsupported
from streamtap.server.admission import Account
from streamtap.server.answering import Answering
from streamtap.server.checks import Plan
from streamtap.server.relaying.engine_http import EngineResponse
from streamtap.server.relaying.expected_rows import ExpectedRows
from streamtap.server.relaying.relay import relay_json
from streamtap.server.relaying.relay_events import relay_events
from streamtap.server.relaying.relay_tensors import relay_tensors
from streamtap.server.service import Service
from streamtap.server.surface.reply import Kind, Reply
from streamtap.server.surface.trace import Trace
from streamtap.wire.safetensors_body import MEDIA_TYPE

_ACCEPTS: dict[Kind, str] = {"json": "application/json", "events": "text/event-stream", "binary": MEDIA_TYPE}


@dataclass(frozen=True)
class EngineCall:
    """The work of one admitted request."""

    service: Service
    plan: Plan
    account: Account
    reply: Reply
    trace: Trace

    async def run(self, answering: Answering) -> None:
        """Wait for slot and engine, then pass the answer on; ``answering`` is told where the request stands.

        Raises:
            NotServing: the engine failed too often just now.
            EngineFailed: it could not be started, or failed; ``CaptureMissed`` and ``EngineOutOfMemory`` alike.
            InvalidInput: it refuses the request; ``Unsupported`` alike.
        """
        await self.account.wait_for_slot()
        answering.stage = "starting"
        pool = self.service.pool
        async with pool.lease(self.plan.served.config.id, self.plan.role) as endpoint:
            answering.stage = "running"
            self.account.ran(sum(self.plan.prompt_tokens), 0)
            payload = to_dialect(
                self.plan.request, model=endpoint.model, stream=self.plan.request.stream, include_usage=True
            )
            try:
                async with self.service.upstream.ask(endpoint, payload, _ACCEPTS[self.reply.kind]) as response:
                    await self._relay(response)
            except (InvalidInput, Unsupported):
                # The caller's mistake says nothing about the engine.
                raise
            except StreamtapError as error:
                pool.failed(endpoint, error)
                raise
            except asyncio.CancelledError:
                if answering.engine_was_late:
                    # As one that nobody reaches: it is looked at before it is leased again.
                    pool.failed(endpoint, EngineUnreachable("the model's engine did not answer in time."))
                raise
            pool.succeeded(endpoint)

    async def _relay(self, response: EngineResponse) -> None:
        media = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if self.reply.kind == "binary" and media != MEDIA_TYPE:
            # An engine that knows nothing of safetensors answers in JSON, and so do we.
            self.reply.kind = "json"
        if media != _ACCEPTS[self.reply.kind]:
            raise EngineFailed(f"the model's engine answered with {media or 'no media type'}; send the request again.")
        async with aclosing(response.chunks()) as pieces:
            capture = self.plan.request.capture
            expected = ExpectedRows(self.plan, capture) if capture is not None else None
            if self.reply.kind == "events":
                await relay_events(
                    pieces,
                    self.reply,
                    include_usage=self.plan.include_usage,
                    ran=self._wrote,
                    settle=self.account.settle,
                )
            elif self.reply.kind == "binary" and expected is not None:
                await relay_tensors(pieces, self.reply, expected=expected, ran=self._ran, settle=self.account.settle)
            else:
                await relay_json(pieces, self.reply, expected=expected, ran=self._ran, settle=self.account.settle)

    def _ran(self, usage: Usage, size_bytes: int) -> None:
        self.account.ran(usage.prompt_tokens, usage.completion_tokens)
        if self.plan.request.capture is not None:
            self.trace.capture_bytes += size_bytes

    def _wrote(self, events: int) -> None:
        self.account.ran(sum(self.plan.prompt_tokens), events)
