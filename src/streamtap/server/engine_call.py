"""One request's way through an engine: the slot, the lease, the call, and the answer on its way back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from streamtap.completion import Usage
from streamtap.engines.vllm import to_dialect, to_vllm
from streamtap.errors import EngineFailed, EngineUnreachable, InvalidInput, StreamtapError, Unsupported
from streamtap.server.admission import Account
from streamtap.server.answering import Answering
from streamtap.server.checks import Plan, for_the_vllm_behind
from streamtap.server.pool.command_line import runs_prompts_whole
from streamtap.server.pool.endpoint import Endpoint
from streamtap.server.relaying.asked_rows import AskedRows
from streamtap.server.relaying.engine_http import EngineResponse
from streamtap.server.relaying.expected_rows import ExpectedRows
from streamtap.server.relaying.held_back import held_back
from streamtap.server.relaying.interruptions import Interruptions
from streamtap.server.relaying.relay import relay_json
from streamtap.server.relaying.relay_events import relay_events
from streamtap.server.relaying.relay_tensors import relay_tensors
from streamtap.server.relaying.vllm_rows import mapped_rows
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
            try:
                await self._answered(endpoint)
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

    async def _answered(self, endpoint: Endpoint) -> None:
        upstream, plan = self.service.upstream, self.plan
        told: dict[str, Any] = {"model": endpoint.model, "stream": plan.request.stream, "include_usage": True}
        if not await self._is_vllm(endpoint):
            self.account.ran(sum(plan.prompt_tokens), 0)
            payload = to_dialect(plan.request, **told)
            async with upstream.ask(endpoint, payload, _ACCEPTS[self.reply.kind]) as response:
                await self._relay(response)
            return
        payload = await self._for_vllm(told)
        interruptions = await self._interruptions(endpoint)
        self.account.ran(sum(plan.prompt_tokens), 0)
        accept = _ACCEPTS["events" if plan.request.stream else "json"]
        async with upstream.ask(endpoint, payload, accept) as response:
            if interruptions is not None:
                # Its answer begins when all rows are captured.
                await interruptions.check()
            await self._relay(response, is_vllm=True)

    async def _is_vllm(self, endpoint: Endpoint) -> bool:
        """Whether the engine is no worker of ours; it is asked where the configuration does not say what it is."""
        config = self.plan.served.config
        if config.engine == "url" or config.command:
            return not await self.service.upstream.is_ours(endpoint)
        return config.engine == "vllm"

    async def _for_vllm(self, told: dict[str, Any]) -> dict[str, Any]:
        """What a vLLM is sent; spans grow to many times their size, where nobody waits for that."""

        def made() -> dict[str, Any]:
            return to_vllm(for_the_vllm_behind(self.plan), **told)

        spreads = any(vector.spans is not None for vector in self.plan.request.steering)
        return await asyncio.to_thread(made) if spreads else made()

    async def _interruptions(self, endpoint: Endpoint) -> Interruptions | None:
        """What is to be checked of a capture; nothing where a prompt in one piece is captured before any of that."""
        capture = self.plan.request.capture
        is_safe = self.plan.request.max_tokens == 1 and runs_prompts_whole(self.plan.served.config)
        if capture is None or is_safe:
            return None
        return await Interruptions.so_far(self.service.upstream, endpoint, capture.layers[0])

    async def _relay(self, response: EngineResponse, *, is_vllm: bool = False) -> None:
        """Pass the answer on; a capture of a vLLM is made into ours, and looked at whole, before any of it goes on."""
        capture = self.plan.request.capture
        media = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        maps = is_vllm and capture is not None and media == _ACCEPTS["json"]
        if self.reply.kind == "binary" and media != MEDIA_TYPE and not maps:
            # An engine that knows nothing of safetensors answers in JSON, and so do we.
            self.reply.kind = "json"
        if media != _ACCEPTS[self.reply.kind] and not maps:
            raise EngineFailed(f"the model's engine answered with {media or 'no media type'}; send the request again.")
        async with aclosing(response.chunks()) as pieces:
            if capture is None or not maps:
                await self._pass_on(pieces)
                return
            asked, folder = AskedRows.of(self.plan, capture), self.service.config.data_dir
            async with (
                aclosing(mapped_rows(pieces, asked, binary=self.reply.kind == "binary")) as mapped,
                aclosing(held_back(mapped, folder)) as looked_at,
            ):
                await self._pass_on(looked_at)

    async def _pass_on(self, pieces: AsyncIterator[bytes]) -> None:
        capture, settle = self.plan.request.capture, self.account.settle
        expected = ExpectedRows(self.plan, capture) if capture is not None else None
        if self.reply.kind == "events":
            include_usage = self.plan.include_usage
            await relay_events(pieces, self.reply, include_usage=include_usage, ran=self._wrote, settle=settle)
        elif self.reply.kind == "binary" and expected is not None:
            await relay_tensors(pieces, self.reply, expected=expected, ran=self._ran, settle=settle)
        else:
            await relay_json(pieces, self.reply, expected=expected, ran=self._ran, settle=settle)

    def _ran(self, usage: Usage, size_bytes: int) -> None:
        self.account.ran(usage.prompt_tokens, usage.completion_tokens)
        if self.plan.request.capture is not None:
            self.trace.capture_bytes += size_bytes

    def _wrote(self, events: int) -> None:
        self.account.ran(sum(self.plan.prompt_tokens), events)
