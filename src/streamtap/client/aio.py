"""``AsyncClient``: the same as ``Client``, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator
from typing import Any, Self, TypeVar, Unpack

import httpx2

from streamtap.client.address import find_address
from streamtap.client.aio_harvests import AsyncHarvestJob
from streamtap.client.answers import Answer, NoAnswer
from streamtap.client.bodies import PromptLike
from streamtap.client.calls import Call, completion_call, model_status_call, models_call, stream_call, usage_call
from streamtap.client.harvest_bodies import HarvestOptions, HarvestPrompts
from streamtap.client.harvest_calls import jobs_call
from streamtap.client.harvest_files import HarvestFiles
from streamtap.client.harvest_plans import HarvestPlans, begin, resume
from streamtap.client.harvest_status import HarvestStatus
from streamtap.client.options import CompletionOptions
from streamtap.client.plans import Plan, carry_out_awaiting
from streamtap.client.retrying import PATIENT, Retries, asking
from streamtap.client.streaming import DeltaReader, Opened, is_stream, opening
from streamtap.client.sync import Client
from streamtap.client.transport import broke_off, no_answer, request_options, session_options
from streamtap.completion import Completion, Delta, Usage
from streamtap.layers import LayerSpec
from streamtap.settings import Settings
from streamtap.wire.harvest_jobs import JobView

T = TypeVar("T")
Outcome = TypeVar("Outcome")


class AsyncClient:
    """``Client`` for asyncio, with the same arguments, answers and errors; what asks the server is awaited.

    A task that is cancelled ends its request, and the server stops the work.
    """

    def __init__(
        self,
        api_base: str | None = None,
        api_key: str | None = None,
        *,
        timeout_seconds: float = 900.0,
        retries: Retries | None = PATIENT,
        transport: httpx2.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Nothing is sent yet.

        Raises:
            InvalidInput: no address, or one that is none or holds a key, or a key that cannot be sent.
            MissingAuthorization: no key.
        """
        self._address = find_address(api_base, api_key, Settings.from_environment())
        self._http = httpx2.AsyncClient(transport=transport, **session_options(self._address, timeout_seconds))
        self._retries, self._sleep = retries, sleep
        self._timeout_seconds, self._transport = timeout_seconds, transport

    def __repr__(self) -> str:
        return f"AsyncClient({self._address.base!r})"

    async def __aenter__(self) -> Self:
        """The client itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close."""
        await self.aclose()

    async def aclose(self) -> None:
        """Let go of the connections."""
        await self._http.aclose()

    async def complete(
        self,
        prompt: PromptLike,
        *,
        model: str | None = None,
        binary: bool = False,
        **options: Unpack[CompletionOptions],
    ) -> Completion:
        """As ``Client.complete``, with the same errors."""
        return await self._ask(completion_call(prompt, model, binary, options))

    def stream(
        self,
        prompt: PromptLike,
        *,
        model: str | None = None,
        include_usage: bool = True,
        **options: Unpack[CompletionOptions],
    ) -> AsyncStream:
        """As ``Client.stream``; to be read with ``async for``.

        Raises:
            InvalidInput: what cannot be asked.
        """
        call = stream_call(prompt, model, include_usage, options)
        return AsyncStream(lambda: self._drive(opening(call, self._retries), lambda: self._open(call)))

    async def models(self) -> list[dict[str, Any]]:
        """The models that are served, with their capabilities."""
        return await self._ask(models_call())

    async def model_status(self, model: str) -> dict[str, Any]:
        """Whether a model's engines are warm, and where a start stands."""
        return await self._ask(model_status_call(model))

    async def usage(self) -> dict[str, Any]:
        """What this key has used and has left."""
        return await self._ask(usage_call())

    async def harvest(
        self,
        prompts: HarvestPrompts,
        *,
        model: str,
        layers: LayerSpec | None = None,
        **options: Unpack[HarvestOptions],
    ) -> AsyncHarvestJob:
        """As ``Client.harvest``, with the same errors."""
        return AsyncHarvestJob(self, await self.carry_out(begin(prompts, model, layers, options, self._plans)))

    async def harvest_job(self, *job_ids: str) -> AsyncHarvestJob:
        """As ``Client.harvest_job``, with the same errors."""
        return AsyncHarvestJob(self, await self.carry_out(resume(job_ids, self._plans)))

    async def harvests(self) -> list[JobView]:
        """The newest jobs of this key, a hundred at most."""
        return await self._ask(jobs_call())

    async def carry_out(self, plan: Plan[T]) -> T:
        """What a plan of several calls comes to."""
        return await carry_out_awaiting(plan, self._ask, self._sleep)

    def harvest_files(self, status: HarvestStatus) -> HarvestFiles:
        """As ``Client.harvest_files``; what it gives blocks.

        Raises:
            InvalidInput: a job is not over.
            HarvestNotFound: files that are not there, or no more.
        """
        blocking = Client(
            *(self._address.base, self._address.key),
            timeout_seconds=self._timeout_seconds,
            retries=self._retries,
            transport=self._transport if isinstance(self._transport, httpx2.BaseTransport) else None,
        )
        return blocking.harvest_files(status)

    def _plans(self, **known: Any) -> HarvestPlans:
        return HarvestPlans(retries=self._retries, poll_seconds=self._timeout_seconds / 2, **known)

    async def _ask(self, call: Call[T]) -> T:
        return await self._drive(asking(call.read, self._retries, call.at_once), lambda: self._send(call))

    async def _drive(
        self, steps: Generator[float, Outcome | NoAnswer, T], send: Callable[[], Awaitable[Outcome | NoAnswer]]
    ) -> T:
        wait = next(steps)
        while True:
            if wait:
                await self._sleep(wait)
            outcome = await send()
            try:
                wait = steps.send(outcome)
            except StopIteration as over:
                found: T = over.value
                return found

    async def _send(self, call: Call[Any]) -> Answer | NoAnswer:
        response = None
        try:
            request = self._http.build_request(**request_options(self._address, call))
            response = await self._http.send(request, stream=True)
            return Answer(response.status_code, response.headers, await response.aread())
        except httpx2.RequestError as error:
            return no_answer(error, self._address, begun=response is not None, repeatable=call.repeatable)
        finally:
            if response is not None:
                await response.aclose()

    async def _open(self, call: Call[Any]) -> Opened | Answer | NoAnswer:
        """Begin a stream, up to the first thing that a caller would notice."""
        response, kept = None, False
        try:
            request = self._http.build_request(**request_options(self._address, call))
            response = await self._http.send(request, stream=True)
            if not is_stream(response.status_code, response.headers):
                return Answer(response.status_code, response.headers, await response.aread())
            opened = Opened(DeltaReader(), response, response.aiter_bytes())
            async for chunk in opened.chunks:
                opened.reader.feed(chunk)
                if opened.reader.begun:
                    break
            kept = not opened.reader.failed
            return opened
        except httpx2.RequestError as error:
            return no_answer(error, self._address, begun=response is not None)
        finally:
            if response is not None and not kept:
                await response.aclose()


class AsyncStream(AsyncIterator[Delta]):
    """Deltas of one request as they come; to close it before its end stops the work on the server.

    ``usage`` is known when the last delta was given, where the server tells it.
    """

    def __init__(self, open_: Callable[[], Awaitable[Opened]]) -> None:
        self.usage: Usage | None = None
        self._deltas = self._run(open_)

    async def __anext__(self) -> Delta:
        """The next delta.

        Raises:
            StreamtapError: the server's error, however late, as its class.
            TransferFailed: the stream broke off.
        """
        return await anext(self._deltas)

    async def __aenter__(self) -> Self:
        """The stream itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close."""
        await self.aclose()

    async def aclose(self) -> None:
        """End the connection."""
        await self._deltas.aclose()

    async def _run(self, open_: Callable[[], Awaitable[Opened]]) -> AsyncGenerator[Delta, None]:
        opened = await open_()
        reader = opened.reader
        try:
            while True:
                for delta in reader.take():
                    yield delta
                chunk = await anext(opened.chunks, b"")
                if not chunk:
                    break
                reader.feed(chunk)
            # Read to the very end, for to the server a client that hangs up before has left.
            reader.end()
        except httpx2.RequestError as error:
            if not reader.done:
                raise broke_off(error) from None
        finally:
            self.usage = reader.usage
            await opened.response.aclose()
