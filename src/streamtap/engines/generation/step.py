"""One step of the engine: a pass over pieces of many sequences, steered and captured, then a token for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from streamtap.capture.head import SLICE_BYTES, Head
from streamtap.capture.packed import Piece, States
from streamtap.capture.passes import Passes
from streamtap.capture.steering import Steering
from streamtap.completion import Delta
from streamtap.engines.generation.rows import not_finite
from streamtap.engines.generation.sampling import finite_rows
from streamtap.engines.generation.sequence import SequenceRun, room_for
from streamtap.errors import EngineOutOfMemory, StreamtapError


@dataclass(eq=False)
class Member:
    """A sequence in a step, its steering, and those of the same prompt that wait for it."""

    sequence: SequenceRun
    steering: Steering | None = None
    followers: tuple[SequenceRun, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """What a step gave one sequence: text, or the error that ends its request."""

    sequence: SequenceRun
    deltas: tuple[Delta, ...] = ()
    error: StreamtapError | None = None


class Stepper:
    """Runs steps on one model; for one thread."""

    def __init__(self, passes: Passes, head: Head, hidden: int, n_layers: int, device: torch.device) -> None:
        self._passes, self._head = passes, head
        self._hidden, self._n_layers, self._device = hidden, n_layers, device

    def run(self, members: Sequence[Member]) -> list[Outcome]:
        """One token for every member; an error of one leaves the others whole.

        Raises:
            CaptureMissed: the pass itself went wrong, for all of them.
            torch.OutOfMemoryError: it did not fit; no sequence has changed, so that all can be run again.
        """
        pieces = [self._piece(member) for member in members]
        of_piece = {id(piece): member for piece, member in zip(pieces, members, strict=True)}
        for piece, member in zip(pieces, members, strict=True):
            if member.sequence.collector is not None:
                member.sequence.collector.begin(piece.fresh, piece.stop, self._device)

        def visit(
            layer: int, stream: torch.Tensor, seen: Sequence[Piece], bounds: Sequence[int]
        ) -> torch.Tensor | None:
            return _visit(layer, stream, [of_piece[id(piece)] for piece in seen], seen, bounds)

        return self._outcomes(members, pieces, self._passes.run(pieces, visit, sorted(_layers(members))))

    def _piece(self, member: Member) -> Piece:
        sequence = member.sequence
        if self._passes.resumes and sequence.goes_on and sequence.states is None:
            sequence.states = States(room_for(sequence.prompt_ids, sequence.request.max_tokens))
        return sequence.piece(resumes=self._passes.resumes)

    def _outcomes(self, members: Sequence[Member], pieces: Sequence[Piece], normed: torch.Tensor) -> list[Outcome]:
        stops = list(accumulate(len(piece.token_ids) for piece in pieces))
        with torch.no_grad():
            last = self._head.logits(normed[torch.tensor(stops, device=normed.device) - 1])
            finite = finite_rows(last).tolist()
            outcomes = []
            for place, (member, piece, stop) in enumerate(zip(members, pieces, stops, strict=True)):
                rows = normed[stop - len(piece.token_ids) : stop]
                outcomes += self._outcome(member, rows, last[place], is_finite=finite[place])
        return outcomes

    def _outcome(self, member: Member, rows: torch.Tensor, last: torch.Tensor, *, is_finite: bool) -> list[Outcome]:
        """What the pass gave one member; as others have gone on by now, what goes wrong here is its alone."""
        sequence = member.sequence
        try:
            if sequence.collector is not None:
                sequence.collector.end()
            if not is_finite:
                steered = member.steering is not None
                raise not_finite("the language-model head", self._n_layers - 1, steered=steered)
            return self._advanced(member, rows, last)
        except StreamtapError as error:
            return [Outcome(sequence, error=error)]
        except torch.OutOfMemoryError:
            tokens = len(sequence.prompt_ids)
            said = f"what was asked beside a prompt of {tokens} tokens does not fit into the engine's memory now."
            return [Outcome(sequence, error=EngineOutOfMemory(said))]

    def _advanced(self, member: Member, rows: torch.Tensor, last: torch.Tensor) -> list[Outcome]:
        """A token for the member and, after its prompt ran, for those that waited; ``rows`` is the normed stream."""
        sequence = member.sequence
        if sequence.token_ids:
            return [Outcome(sequence, (sequence.take(last),))]
        self._read_prompt(sequence, rows)
        outcomes = [_first(sequence, last)]
        for follower in member.followers:
            if sequence.states is not None and follower.goes_on:
                follower.states = sequence.states.copy()
            follower.echo_logs, follower.prompt_logs = sequence.echo_logs, sequence.prompt_logs
            outcomes.append(_first(follower, last))
        return outcomes

    def _read_prompt(self, sequence: SequenceRun, rows: torch.Tensor) -> None:
        """Log-probabilities of the prompt's own tokens, a slice at a time."""
        builders = [each for each in (sequence.echo_logs, sequence.prompt_logs) if each is not None]
        if not builders:
            return
        step = max(1, SLICE_BYTES // (4 * self._head.vocabulary))
        for start in range(0, len(rows) - 1, step):
            logits = self._head.logits(rows[start : min(start + step, len(rows) - 1)])
            for builder in builders:
                builder.add(logits)


def _first(sequence: SequenceRun, last: torch.Tensor) -> Outcome:
    opening = sequence.opening()
    if sequence.request.max_tokens == 0:
        return Outcome(sequence, (*opening, sequence.end_without_tokens()))
    return Outcome(sequence, (*opening, sequence.take(last)))


def _layers(members: Sequence[Member]) -> set[int]:
    wanted: set[int] = set()
    for member in members:
        if member.steering is not None:
            wanted |= member.steering.layers
        if member.sequence.collector is not None:
            wanted |= set(member.sequence.collector.ask.layers)
    return wanted


def _visit(
    layer: int, stream: torch.Tensor, members: Sequence[Member], pieces: Sequence[Piece], bounds: Sequence[int]
) -> torch.Tensor | None:
    """Steer first, then capture: a capture at a steered layer shows the steered value."""
    steers = [member.steering is not None and layer in member.steering.layers for member in members]
    changed = stream.clone() if any(steers) else stream
    for member, piece, start, stop, steered in zip(members, pieces, bounds, bounds[1:], steers, strict=False):
        rows = changed[start:stop]
        if steered and member.steering is not None:
            member.steering.apply(layer, rows, piece.start)
        if member.sequence.collector is not None:
            member.sequence.collector.see(layer, rows[piece.fresh - piece.start :], piece.fresh)
    return changed if any(steers) else None
