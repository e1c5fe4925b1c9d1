"""Completions of a service that are under way, each told to its caller as an engine in this process would tell it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import partial

from streamtap.client.sync import Client
from streamtap.completion import Cancel, Completion, Delta, Emit, Event, Failed, Finished, Usage
from streamtap.engines.api_asked import Asked
from streamtap.engines.api_asking import Asking
from streamtap.engines.api_lanes import Lanes
from streamtap.engines.api_written import TokenNames, Written, choices_of
from streamtap.errors import EngineFailed, ServerRestarting, StreamtapError


@dataclass(eq=False)
class Flight:
    """One request; nothing is emitted once it is over."""

    emit: Emit
    over: threading.Event = field(default_factory=threading.Event)
    #: An emission may itself cancel.
    lock: threading.RLock = field(default_factory=threading.RLock)

    def say(self, event: Event) -> None:
        """Emit one of several events."""
        with self.lock:
            if not self.over.is_set():
                self.emit(event)

    def end(self, event: Event | None) -> None:
        """Emit the last event, unless it has ended before; None ends it without a word."""
        with self.lock:
            if not self.over.is_set():
                self.over.set()
                if event is not None:
                    self.emit(event)


@dataclass(frozen=True)
class Flights:
    """Runs requests in ``lanes``.

    What can be is asked for as a stream, whoever listens: to leave a stream stops the work on the server with the next
    token. A request with rows, or with the prompt's log-probabilities, comes whole, and runs to its end.
    """

    client: Client
    model: str
    names: TokenNames
    lanes: Lanes = field(repr=False)
    asking: Asking = field(repr=False)
    _open: set[Flight] = field(default_factory=set, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def start(self, asked: Asked, emit: Emit, *, streams: bool) -> Cancel:
        """Queue a request; ``streams`` is whether its caller is told of text as it is made."""
        flight = Flight(emit)
        with self._lock:
            self._open.add(flight)
        self.lanes.put(partial(self._run, asked, flight, streams))
        return partial(flight.end, None)

    def close(self) -> None:
        """Fail what is under way."""
        with self._lock:
            left = list(self._open)
        for flight in left:
            flight.end(Failed(ServerRestarting("the engine was closed before the request was done; open it again.")))

    def _run(self, asked: Asked, flight: Flight, streams: bool) -> None:
        try:
            if not flight.over.is_set():
                flight.end(self._outcome(asked, flight, streams))
        except StreamtapError as error:
            flight.end(Failed(error))
        except BaseException as error:
            flight.end(Failed(EngineFailed(f"the request failed with {type(error).__name__}.")))
            raise
        finally:
            with self._lock:
                self._open.discard(flight)

    def _outcome(self, asked: Asked, flight: Flight, streams: bool) -> Finished | None:
        if asked.streams and streams:
            # What was told already cannot be told again, so a stream that breaks has failed.
            return self._streamed(asked, flight, told=True)
        if asked.streams:
            return self.asking(lambda: self._streamed(asked, flight, told=False), stopped=flight.over)
        found = self.asking(lambda: self._whole(asked), stopped=flight.over)
        choices = choices_of(found, asked, self.names)
        for choice in choices if streams else ():
            logs = choice.logs or ()
            flight.say(Delta(choice.index, choice.text, logs, choice.finish_reason, choice.stop_reason))
        return Finished(choices, found.usage)

    def _whole(self, asked: Asked) -> Completion:
        return self.client.complete(asked.request, model=self.model)

    def _streamed(self, asked: Asked, flight: Flight, *, told: bool) -> Finished | None:
        """None where its caller has left it."""
        written: dict[int, Written] = {}
        with self.client.stream(asked.request, model=self.model) as deltas:
            for delta in self.asking.each(deltas):
                if flight.over.is_set():
                    return None
                written.setdefault(delta.index, Written()).take(delta)
                if told:
                    flight.say(delta)
            usage = deltas.usage
        choices = tuple(each.choice(index, asked) for index, each in sorted(written.items()))
        return Finished(choices, usage or Usage(sum(map(len, asked.prompt_ids)), 0))
