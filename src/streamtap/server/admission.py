"""The door: each request gets its slot from the ledger, waits for it where it must, and gives it back exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from streamtap.errors import SteeringNotFinite, StreamtapError
from streamtap.server.clock import Clock
from streamtap.server.deferred import Deferred
from streamtap.server.ledger import Grant, Ledger, Outcome, Ticket
from streamtap.server.surface.problems import code_of, status_of
from streamtap.server.surface.trace import Trace

if TYPE_CHECKING:
    from streamtap.completion import Usage
    from streamtap.server.ledger.keys import KeyRecord

#: How often a waiting request looks whether another gateway freed a slot, in seconds.
_LOOK_SECONDS = 0.25
_Result = TypeVar("_Result")


class Admission:
    """The ledger as the event loop sees it; its calls run on threads of their own."""

    def __init__(self, ledger: Ledger, executor: Executor, clock: Clock) -> None:
        self.ledger = ledger
        self.clock = clock
        self._executor = executor
        self._lines: dict[str, _Line] = {}
        self._owed: list[tuple[Ticket, Outcome]] = []

    async def call(self, function: Callable[..., _Result], *args: Any, **named: Any) -> _Result:
        """Run a function of the ledger."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, partial(function, *args, **named))

    async def admit(self, presented: str | None, trace: Trace, *, scope: str) -> Account:
        """Let a request in, or into the line of its key.

        Raises:
            KeyRefused: no key, or one that is not taken.
            LimitReached: the key starts too many requests, or has too many under way.
        """
        ticket = await self.call(
            self.ledger.admit, presented, scope=scope, endpoint=trace.endpoint, request_id=trace.request_id
        )
        trace.key_prefix = ticket.key.prefix
        return Account(self, ticket, trace)

    async def authenticate(self, presented: str | None, scope: str | None = None) -> KeyRecord:
        """The record of a key that is in use and has ``scope``, whatever it may do where that is None.

        Raises:
            KeyRefused: no key, or one that is not taken.
        """
        return await self.call(self.ledger.authenticate, presented, scope)

    async def sweep(self) -> int:
        """Settle what the database failed to take, and what gateways held that are no more; how many those held."""
        while self._owed:
            ticket, outcome = self._owed[0]
            await self.call(self.ledger.settle, ticket, outcome)
            self._owed.pop(0)
            self.slot_freed(ticket.key.prefix)
        return await self.call(self.ledger.sweep)

    def owe(self, ticket: Ticket, outcome: Outcome) -> None:
        """Settle a ticket with the next sweep; whoever was to be told of a success heard of a failure instead."""
        failed = Outcome(500, StreamtapError.code, 0, 0, refund=True, seconds=outcome.seconds)
        self._owed.append((ticket, failed if outcome.status == 200 else outcome))

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot of their key."""
        return sum(line.length for line in self._lines.values())

    async def wait_for_slot(self, ticket: Ticket) -> None:
        """Return once the ticket holds one of its key's slots; first come, first served."""
        line = self._lines.setdefault(ticket.key.prefix, _Line())
        line.length += 1
        try:
            async with line.turn:
                while True:
                    freed = line.listen()
                    if await self.call(self.ledger.activate, ticket):
                        return
                    await self.clock.wait(freed, _LOOK_SECONDS)
        finally:
            line.length -= 1
            if not line.length:
                self._lines.pop(ticket.key.prefix, None)

    def slot_freed(self, key_prefix: str) -> None:
        """Tell the first in the key's line to look again."""
        if key_prefix in self._lines:
            self._lines[key_prefix].wake()


class _Line:
    """Requests of one key that wait; only the first asks the ledger."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.length = 0
        self._freed: asyncio.Future[None] | None = None

    def listen(self) -> asyncio.Future[None]:
        self._freed = asyncio.get_running_loop().create_future()
        return self._freed

    def wake(self) -> None:
        if self._freed is not None and not self._freed.done():
            self._freed.set_result(None)


class Account:
    """What one admitted request holds and uses; leaving its block settles it, if that was not done before.

    What failed on the server's side and what was refused uses nothing. A request whose client left, or whose own
    vectors broke it, is charged what had been run by then: ``ran`` says so.
    """

    def __init__(self, admission: Admission, ticket: Ticket, trace: Trace) -> None:
        self.ticket = ticket
        self._admission = admission
        self._trace = trace
        self._ran: tuple[int, int] | None = None
        self._settled = False
        self._deferred: Deferred | None = None

    async def check_activation_quota(self) -> None:
        """Refuse a capture whose month is used up.

        Raises:
            ActivationQuotaExceeded: it is.
        """
        await self._admission.call(self._admission.ledger.check_activation_quota, self.ticket)

    async def reserve(
        self, *, model: str, input_tokens: int, output_tokens: int, activations: int, sequences: int
    ) -> Grant:
        """Set aside what the request may use at most.

        Raises:
            ActivationQuotaExceeded: other requests took the last captures of the month.
            BudgetExceeded: the key or its user has not enough tokens left.
        """
        ledger = self._admission.ledger
        asked = {"input_tokens": input_tokens, "output_tokens": output_tokens, "activations": activations}
        asked["sequences"] = sequences
        reserve = partial(self._admission.call, ledger.reserve, self.ticket, model=model, **asked)
        ticket = ledger.unreserved(self.ticket, model=model, **asked)
        if ticket is None:
            return await reserve()
        # Nothing limits it, so that no answer has to wait for this.
        self.ticket = ticket
        self._deferred = Deferred(reserve)
        return Grant(output_tokens, clamped=False)

    async def wait_for_slot(self) -> None:
        """Return once the request holds a slot."""
        if not self.ticket.active:
            await self._admission.wait_for_slot(self.ticket)

    def ran(self, input_tokens: int, output_tokens: int) -> None:
        """The engine has taken in and written so much by now."""
        self._ran = (input_tokens, output_tokens)

    async def settle(self, usage: Usage) -> None:
        """Charge an answer that is whole; called before its last bytes go out."""
        await self._settle(200, None, usage.prompt_tokens, usage.completion_tokens, refund=False)

    async def took_on(self, input_tokens: int) -> None:
        """Settle a job that was taken, whose tokens are charged with the job itself."""
        await self._settle(202, None, input_tokens, 0, refund=False)

    async def __aenter__(self) -> Self:
        """Nothing more than the block."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trail: TracebackType | None
    ) -> None:
        """Give back what a request that did not come to its end still holds."""
        if self._settled:
            return
        if error is None:
            error = RuntimeError("a request ended without an answer")
        used = self._ran if code_of(error) is None or isinstance(error, SteeringNotFinite) else None
        tokens = used or (0, 0)
        await self._settle(status_of(error), code_of(error), *tokens, refund=used is None)

    async def _settle(
        self, status: int, code: str | None, input_tokens: int, output_tokens: int, *, refund: bool
    ) -> None:
        self._settled = True
        trace = self._trace
        trace.input_tokens, trace.output_tokens = input_tokens, output_tokens
        outcome = Outcome(
            status=status,
            code=code,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            refund=refund,
            capture_bytes=trace.capture_bytes,
            seconds=self._admission.clock.monotonic() - trace.started,
            model=trace.model,
        )
        settling = asyncio.ensure_future(self._book(outcome))
        settling.add_done_callback(partial(self._over, outcome))
        # The ledger's thread does it in any case; a client that leaves now only stops the waiting for it.
        await asyncio.shield(settling)

    async def _book(self, outcome: Outcome) -> None:
        if self._deferred is not None:
            await self._deferred.end()
        await self._admission.call(self._admission.ledger.settle, self.ticket, outcome)

    def _over(self, outcome: Outcome, settling: asyncio.Future[Any]) -> None:
        if not settling.cancelled() and settling.exception() is not None:
            self._admission.owe(self.ticket, outcome)
        self._admission.slot_freed(self.ticket.key.prefix)
