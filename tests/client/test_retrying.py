from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from streamtap.client.answers import NoAnswer
from streamtap.client.retrying import Retries, asking
from streamtap.errors import (
    ActivationQuotaExceeded,
    CaptureMissed,
    CircuitOpen,
    ColdStart,
    EngineDead,
    InvalidInput,
    KeyRevoked,
    NotServing,
    QueueFull,
    RateLimited,
    StreamtapError,
    TransferFailed,
)


def _refused(kind: type[StreamtapError], retry_after_seconds: int | None = None) -> StreamtapError:
    error = kind("not now")
    error.retry_after_seconds = retry_after_seconds
    return error


@dataclass
class Asked:
    """Outcomes in order, each taking ``seconds``; what was waited before each."""

    outcomes: Iterator[StreamtapError | NoAnswer | str]
    seconds: float = 0.0
    time: float = 0.0
    waits: list[float] = field(default_factory=list)

    def run(self, plan: Callable[..., Retries] | None = Retries, **patience: float) -> str:
        def read(outcome: StreamtapError | str) -> str:
            if isinstance(outcome, StreamtapError):
                raise outcome
            return outcome

        steps = asking(read, None if plan is None else plan(now=lambda: self.time, **patience))
        wait = next(steps)
        while True:
            self.waits.append(wait)
            self.time += wait + self.seconds
            try:
                wait = steps.send(next(self.outcomes))  # type: ignore[arg-type]
            except StopIteration as over:
                return str(over.value)


def _asked(*outcomes: StreamtapError | NoAnswer | str, seconds: float = 0.0) -> Asked:
    return Asked(iter(outcomes), seconds)


def test_an_answer_is_taken_at_once() -> None:
    asked = _asked("done")

    assert asked.run() == "done"
    assert asked.waits == [0.0]


@pytest.mark.parametrize("kind", [QueueFull, RateLimited, CircuitOpen, ColdStart])
def test_what_may_be_asked_again_is_asked_when_the_server_says(kind: type[StreamtapError]) -> None:
    asked = _asked(_refused(kind, 5), _refused(kind, 30), "done")

    assert asked.run() == "done"
    assert asked.waits == [0.0, 5.0, 30.0]


@pytest.mark.parametrize(
    "error",
    [
        InvalidInput("no"),
        KeyRevoked("no"),
        CaptureMissed("no", layer=3),
        EngineDead("no"),
        _refused(ActivationQuotaExceeded),
        _refused(QueueFull, 121),
        TransferFailed("broke off"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_is_of_no_use_is_not_asked_again(error: StreamtapError) -> None:
    asked = _asked(error, "done")

    with pytest.raises(type(error)) as caught:
        asked.run()

    assert caught.value is error
    assert asked.waits == [0.0]


def test_the_servers_own_word_that_it_is_of_no_use_goes_before_the_class() -> None:
    error = _refused(QueueFull, 5)
    vars(error)["retryable"] = False

    with pytest.raises(QueueFull):
        _asked(error, "done").run()


def test_a_server_that_does_not_say_when_is_asked_more_and_more_rarely() -> None:
    asked = _asked(*[_refused(NotServing) for _ in range(8)], "done")

    assert asked.run() == "done"
    assert asked.waits == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


def test_patience_ends() -> None:
    asked = _asked(*[_refused(ColdStart, 30) for _ in range(100)])

    with pytest.raises(ColdStart):
        asked.run(patience_seconds=100)

    assert asked.waits == [0.0, 30.0, 30.0, 30.0]


def test_patience_counts_what_the_server_took() -> None:
    """A server that holds each request for its 14 minutes is asked twice, and not thirty times."""
    asked = _asked(*[_refused(ColdStart, 30) for _ in range(100)], seconds=840.0)

    with pytest.raises(ColdStart):
        asked.run()

    assert asked.waits == [0.0, 30.0]


def test_a_connection_that_failed_before_an_answer_is_tried_a_few_times() -> None:
    gone = NoAnswer(TransferFailed("refused"), unheard=True)
    asked = _asked(gone, gone, gone, gone, "done")

    with pytest.raises(TransferFailed, match="refused"):
        asked.run()

    assert asked.waits == [0.0, 0.5, 1.0, 2.0]
    assert _asked(gone, "done").run() == "done"


def test_an_answer_that_broke_off_is_not_asked_again() -> None:
    asked = _asked(NoAnswer(TransferFailed("broke off"), unheard=False), "done")

    with pytest.raises(TransferFailed):
        asked.run()

    assert asked.waits == [0.0]


@pytest.mark.parametrize("outcome", [_refused(QueueFull, 1), NoAnswer(TransferFailed("refused"), unheard=True)])
def test_without_retries_nothing_is_asked_again(outcome: StreamtapError | NoAnswer) -> None:
    with pytest.raises(StreamtapError):
        _asked(outcome, "done").run(None)
