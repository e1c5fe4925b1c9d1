"""What takes several calls, as a plan that both clients carry out, each in its own way of asking and waiting."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from streamtap.client.calls import Call
from streamtap.errors import StreamtapError

T = TypeVar("T")


@dataclass(frozen=True)
class Pause:
    """Nothing is asked for ``seconds``."""

    seconds: float


#: Yields what is to be done next; what a call gave is sent in, and what it raised is thrown in.
Plan = Generator[Call[Any] | Pause, Any, T]


def carry_out(plan: Plan[T], ask: Callable[[Call[Any]], Any], sleep: Callable[[float], None]) -> T:
    """What the plan comes to."""
    answer, failed = None, None
    try:
        while True:
            step = plan.send(answer) if failed is None else plan.throw(failed)
            answer, failed = None, None
            try:
                answer = sleep(step.seconds) if isinstance(step, Pause) else ask(step)  # type: ignore[func-returns-value]
            except StreamtapError as error:
                failed = error
    except StopIteration as over:
        found: T = over.value
        return found


async def carry_out_awaiting(
    plan: Plan[T], ask: Callable[[Call[Any]], Awaitable[Any]], sleep: Callable[[float], Awaitable[None]]
) -> T:
    """``carry_out``, awaited."""
    answer, failed = None, None
    try:
        while True:
            step = plan.send(answer) if failed is None else plan.throw(failed)
            answer, failed = None, None
            try:
                answer = await (sleep(step.seconds) if isinstance(step, Pause) else ask(step))
            except StreamtapError as error:
                failed = error
    except StopIteration as over:
        found: T = over.value
        return found
