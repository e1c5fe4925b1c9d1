"""One completion: from the body in the dialect to the engine, and its answer back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from streamtap.completion import CompletionRequest, Failed, Finished
from streamtap.engines.base import Completes
from streamtap.engines.vllm import DialectOptions, from_dialect
from streamtap.engines.worker.bodies import JSON, SAFETENSORS, Body, send_body
from streamtap.engines.worker.clients import Client
from streamtap.engines.worker.flights import Flight
from streamtap.engines.worker.streaming import Naming, stream_answer
from streamtap.engines.worker.whole import check_whole
from streamtap.errors import ModelNotFound
from streamtap.wire.answers import json_answer
from streamtap.wire.reading import read_json
from streamtap.wire.safetensors_body import safetensors_answer


@dataclass(eq=False)
class Completing:
    """Answers completions of the model ``name``; ``live`` are the requests that hold anything of the engine."""

    name: str
    threads: Executor
    keepalive_seconds: float = 5.0
    live: set[Flight] = field(default_factory=set)

    async def answer(self, client: Client, engine: Completes) -> Finished | Failed:
        """Read the client's request, run it and send what comes; a failure before the first byte is left to the caller.

        Raises:
            StreamtapError: the request is not one, or its answer is not whole; nothing was sent yet.
            ClientDisconnect: the client left, and the work was stopped.
        """
        raw = await client.body()
        with self._flight() as flight:
            try:
                request, options = await self._in_thread(self._begin, raw, engine, flight)
                if options.stream:
                    return await stream_answer(
                        client,
                        flight,
                        self._naming(client),
                        include_usage=options.include_usage,
                        keepalive_seconds=self.keepalive_seconds,
                    )
                return await self._whole_answer(client, engine, flight, request)
            finally:
                if flight.is_pending:
                    await self._in_thread(flight.stop)

    async def _whole_answer(
        self, client: Client, engine: Completes, flight: Flight, request: CompletionRequest
    ) -> Finished | Failed:
        last = await client.wait(flight.last())
        if isinstance(last, Failed):
            return last
        naming, hidden = self._naming(client), engine.provenance.hidden
        binary = request.capture is not None and SAFETENSORS in client.headers.get("accept", "")

        def make() -> Body:
            check_whole(request, last, hidden=hidden)
            return _body(last, naming, binary=binary)

        await send_body(client, self.threads, make)
        return last

    def _begin(self, raw: bytes, engine: Completes, flight: Flight) -> tuple[CompletionRequest, DialectOptions]:
        about = engine.provenance
        request, options = from_dialect(read_json(raw), n_layers=about.n_layers, hidden=about.hidden)
        if options.model not in (None, self.name):
            raise ModelNotFound(f"this engine serves {self.name!r} and no other model.")
        flight.begun(engine.submit(request, flight.emit))
        return request, options

    def _naming(self, client: Client) -> Naming:
        return Naming(f"cmpl-{client.request_id}", int(time.time()), self.name)

    @contextmanager
    def _flight(self) -> Iterator[Flight]:
        flight = Flight()
        self.live.add(flight)
        try:
            yield flight
        finally:
            self.live.discard(flight)
            flight.forget()

    async def _in_thread(self, work: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self.threads, work, *arguments)


def _body(finished: Finished, naming: Naming, *, binary: bool) -> Body:
    named = {"id": naming.id, "created": naming.created, "model": naming.model}
    if binary:
        length, pieces = safetensors_answer(finished, **named)  # type: ignore[arg-type]
        return Body(SAFETENSORS, pieces, length)
    return Body(JSON, json_answer(finished, **named))  # type: ignore[arg-type]
