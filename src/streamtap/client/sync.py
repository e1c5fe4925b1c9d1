"""``Client``: a server's completions, captures and steering from a plain program."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from typing import Any, Self, TypeVar, Unpack

import httpx2

from streamtap.client.address import find_address
from streamtap.client.answers import Answer, NoAnswer
from streamtap.client.bodies import PromptLike
from streamtap.client.calls import (
    Call,
    completion_call,
    model_status_call,
    models_call,
    stream_call,
    usage_call,
)
from streamtap.client.harvest_bodies import HarvestOptions, HarvestPrompts
from streamtap.client.harvest_calls import job_call, jobs_call
from streamtap.client.harvest_files import HarvestFiles
from streamtap.client.harvest_plans import HarvestPlans, begin, resume
from streamtap.client.harvest_status import HarvestStatus
from streamtap.client.harvests import HarvestJob
from streamtap.client.links import LinkReader
from streamtap.client.options import CompletionOptions
from streamtap.client.plans import Plan, carry_out
from streamtap.client.retrying import PATIENT, Retries, asking
from streamtap.client.streaming import DeltaReader, Opened, is_stream, opening
from streamtap.client.transport import broke_off, no_answer, request_options, session_options
from streamtap.completion import Completion, Delta, Usage
from streamtap.layers import LayerSpec
from streamtap.settings import Settings
from streamtap.wire.harvest_jobs import JobView

T = TypeVar("T")
Outcome = TypeVar("Outcome")

#: How long whoever keeps a harvest's files may be silent.
_LINK_SECONDS = 60.0


class Client:
    """Asks one server, from any number of threads at once.

    Address and key come from the arguments, else from ``STREAMTAP_API_BASE`` and ``STREAMTAP_API_KEY``, or from
    ``ACS_API_BASE`` and ``ACS_API_KEY``. ``timeout_seconds`` is how long the server may be silent: while an engine
    starts it holds the request and sends a byte every few seconds. What it refuses for the moment is asked again as
    ``retries`` says; None never asks again. Errors are raised as the class that the server raised.
    """

    def __init__(
        self,
        api_base: str | None = None,
        api_key: str | None = None,
        *,
        timeout_seconds: float = 900.0,
        retries: Retries | None = PATIENT,
        transport: httpx2.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Nothing is sent yet.

        Raises:
            InvalidInput: no address, or one that is none or holds a key, or a key that cannot be sent.
            MissingAuthorization: no key.
        """
        self._address = find_address(api_base, api_key, Settings.from_environment())
        self._http = httpx2.Client(transport=transport, **session_options(self._address, timeout_seconds))
        self._retries, self._sleep = retries, sleep
        self._timeout_seconds, self._transport = timeout_seconds, transport

    def __repr__(self) -> str:
        return f"Client({self._address.base!r})"

    def __enter__(self) -> Self:
        """The client itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """Let go of the connections."""
        self._http.close()

    def complete(
        self,
        prompt: PromptLike,
        *,
        model: str | None = None,
        binary: bool = False,
        **options: Unpack[CompletionOptions],
    ) -> Completion:
        """Text, token counts and, where asked for, the rows of the residual stream.

        ``prompt`` is a text, a list of texts, the token ids of one prompt, a list of those, or a ``CompletionRequest``,
        which says all of itself. ``model`` is the server's id. ``binary`` brings a capture as a safetensors file:
        smaller and quicker, but a server whose engine is cold refuses it until the engine is ready, and the client
        asks again.

        Raises:
            InvalidInput: what cannot be asked, as the server or we see it.
            CaptureMissed: the capture lacks a layer or position, or is not finite.
            StreamtapError: anything else that the server reports.
            TransferFailed: the server cannot be reached, or its answer broke off.
        """
        return self._ask(completion_call(prompt, model, binary, options))

    def stream(
        self,
        prompt: PromptLike,
        *,
        model: str | None = None,
        include_usage: bool = True,
        **options: Unpack[CompletionOptions],
    ) -> Stream:
        """The same, text as it is made; nothing is sent before the first delta is asked for.

        ``include_usage=False`` is for servers that do not know ``stream_options``.

        Raises:
            InvalidInput: what cannot be asked.
        """
        call = stream_call(prompt, model, include_usage, options)
        return Stream(lambda: self._drive(opening(call, self._retries), lambda: self._open(call)))

    def models(self) -> list[dict[str, Any]]:
        """The models that are served, with their capabilities."""
        return self._ask(models_call())

    def model_status(self, model: str) -> dict[str, Any]:
        """Whether a model's engines are warm, and where a start stands."""
        return self._ask(model_status_call(model))

    def usage(self) -> dict[str, Any]:
        """What this key has used and has left."""
        return self._ask(usage_call())

    def harvest(
        self,
        prompts: HarvestPrompts,
        *,
        model: str,
        layers: LayerSpec | None = None,
        **options: Unpack[HarvestOptions],
    ) -> HarvestJob:
        """Submit prompts, as many as there are, whose rows come as files; returns as soon as the server has taken them.

        ``prompts`` are texts, or lists of token ids. ``layers`` is a layer spec such as ``[8, 16]``, ``-1``, ``"8-20"``
        or ``"all"``; None is a quarter, a half and three quarters of the depth. Of more prompts than one job may have
        several are made; what there is no slot for is submitted by ``HarvestJob.wait``.

        Raises:
            InvalidInput: what cannot be asked, as the server or we see it.
            HarvestUnsupported: the model has no engine for harvests.
            LimitReached: a quota is used up, or no slot became free for as long as ``retries`` say.
            StreamtapError: anything else that the server reports.
            TransferFailed: the server cannot be reached, or its answer broke off; its text says where a job may have
                been taken all the same.
        """
        return HarvestJob(self, self.carry_out(begin(prompts, model, layers, options, self._plans)))

    def harvest_job(self, *job_ids: str) -> HarvestJob:
        """A harvest that was submitted before, by the ids of its jobs in the order of their prompts.

        Raises:
            HarvestNotFound: there is none, or it is another key's.
        """
        return HarvestJob(self, self.carry_out(resume(job_ids, self._plans)))

    def harvests(self) -> list[JobView]:
        """The newest jobs of this key, a hundred at most."""
        return self._ask(jobs_call())

    def carry_out(self, plan: Plan[T]) -> T:
        """What a plan of several calls comes to."""
        return carry_out(plan, self._ask, self._sleep)

    def harvest_files(self, status: HarvestStatus) -> HarvestFiles:
        """The files of jobs that are done, by connections of their own: they are read after the client is closed too.

        Raises:
            InvalidInput: a job is not over.
            HarvestNotFound: files that are not there, or no more.
        """
        again = Client(
            *(self._address.base, self._address.key),
            timeout_seconds=self._timeout_seconds,
            retries=self._retries,
            transport=self._transport,
            sleep=self._sleep,
        )
        reader = LinkReader(min(self._timeout_seconds, _LINK_SECONDS), self._transport, self._sleep)
        return HarvestFiles(status, self._address.base, reader, lambda job_id: again._ask(job_call(job_id)).job)

    def _plans(self, **known: Any) -> HarvestPlans:
        return HarvestPlans(retries=self._retries, poll_seconds=self._timeout_seconds / 2, **known)

    def _ask(self, call: Call[T]) -> T:
        return self._drive(asking(call.read, self._retries, call.at_once), lambda: self._send(call))

    def _drive(self, steps: Generator[float, Outcome | NoAnswer, T], send: Callable[[], Outcome | NoAnswer]) -> T:
        wait = next(steps)
        while True:
            if wait:
                self._sleep(wait)
            outcome = send()
            try:
                wait = steps.send(outcome)
            except StopIteration as over:
                found: T = over.value
                return found

    def _send(self, call: Call[Any]) -> Answer | NoAnswer:
        response = None
        try:
            request = self._http.build_request(**request_options(self._address, call))
            response = self._http.send(request, stream=True)
            return Answer(response.status_code, response.headers, response.read())
        except httpx2.RequestError as error:
            return no_answer(error, self._address, begun=response is not None, repeatable=call.repeatable)
        finally:
            if response is not None:
                response.close()

    def _open(self, call: Call[Any]) -> Opened | Answer | NoAnswer:
        """Begin a stream, up to the first thing that a caller would notice."""
        response, kept = None, False
        try:
            request = self._http.build_request(**request_options(self._address, call))
            response = self._http.send(request, stream=True)
            if not is_stream(response.status_code, response.headers):
                return Answer(response.status_code, response.headers, response.read())
            opened = Opened(DeltaReader(), response, response.iter_bytes())
            for chunk in opened.chunks:
                opened.reader.feed(chunk)
                if opened.reader.begun:
                    break
            kept = not opened.reader.failed
            return opened
        except httpx2.RequestError as error:
            return no_answer(error, self._address, begun=response is not None)
        finally:
            if response is not None and not kept:
                response.close()


class Stream(Iterator[Delta]):
    """Deltas of one request as they come; to close it before its end stops the work on the server.

    ``usage`` is known when the last delta was given, where the server tells it.
    """

    def __init__(self, open_: Callable[[], Opened]) -> None:
        self.usage: Usage | None = None
        self._deltas = self._run(open_)

    def __next__(self) -> Delta:
        """The next delta.

        Raises:
            StreamtapError: the server's error, however late, as its class.
            TransferFailed: the stream broke off.
        """
        return next(self._deltas)

    def __enter__(self) -> Self:
        """The stream itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """End the connection."""
        self._deltas.close()

    def _run(self, open_: Callable[[], Opened]) -> Generator[Delta, None, None]:
        opened = open_()
        reader = opened.reader
        try:
            while True:
                yield from reader.take()
                chunk = next(opened.chunks, b"")
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
            opened.response.close()
