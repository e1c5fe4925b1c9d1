"""The part of the engines' suite about ``Completes``: rows of what is written, steering, cancelling, refusals.

An engine that does not complete is held to that: it is no ``Completes`` and has no ``submit``.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from streamtap.completion import (
    CaptureAsk,
    CapturedPositions,
    Choice,
    CompletionRequest,
    Event,
    Failed,
    Finished,
    Rows,
    Sampling,
    SteeringVector,
)
from streamtap.engines.base import Completes
from streamtap.errors import (
    EmptyPrompt,
    InvalidInput,
    InvalidPrompt,
    PromptTooLong,
    SteeringUnsupported,
    StreamtapError,
)
from streamtap.testing.engine_suite_holding import hold, hold_rows, refused
from streamtap.testing.engine_suite_subject import EngineSubject, Floats, Ids

_NEW_TOKENS = 5
#: How long nothing may come of a request that was cancelled or refused.
_SILENT_SECONDS = 0.2


class CompletionSuite:
    """See ``EngineSuite``."""

    def test_it_completes_or_says_that_it_does_not(self, subject: EngineSubject) -> None:
        """What the subject says of its engine is so."""
        _completer(subject)

    def test_generated_positions_have_rows(self, subject: EngineSubject) -> None:
        """Six prompt tokens and five new ones give ten rows, for the last one drawn is never fed back."""
        if (engine := _completer(subject)) is None:
            return
        choice = _answer(engine, _request(subject, subject.writes), subject)
        rows, sequence = _rows(choice), (*subject.writes, *choice.token_ids[:-1])
        hold(
            len(choice.token_ids) == _NEW_TOKENS,
            f"{len(choice.token_ids)} of {_NEW_TOKENS} tokens came; if one of them ends the text, set other `writes`",
        )
        fed = len(subject.writes) + _NEW_TOKENS - 1
        hold(rows.layers == tuple(range(subject.n_layers)), f"layers {rows.layers} came of {subject.n_layers}")
        shape = (subject.n_layers, fed, subject.hidden)
        hold(rows.values.shape == shape, f"rows have shape {rows.values.shape}, expected {shape}")
        places = rows.positions.tolist()
        hold(places == list(range(fed)), f"rows stand at {places}, expected 0 to {fed - 1}")
        hold(rows.token_ids.tolist() == list(sequence), "the rows' tokens are not those of prompt and text")
        _hold_layers(rows.values, subject.reference.rows(sequence), subject.tolerance, "prompt and text")

    def test_some_positions_of_a_completion_have_their_rows(self, subject: EngineSubject) -> None:
        """The prompt's, the generated ones, the last, and any by number."""
        if (engine := _completer(subject)) is None:
            return
        n, fed = len(subject.writes), len(subject.writes) + _NEW_TOKENS - 1
        asked: list[tuple[CapturedPositions, list[int]]] = [
            ("prompt", list(range(n))),
            ("generated", list(range(n, fed))),
            ("last", [fed - 1]),
            ((0, n + 1), [0, n + 1]),
        ]
        for positions, places in asked:
            choice = _answer(engine, _request(subject, subject.writes, positions=positions), subject)
            rows, sequence = _rows(choice), (*subject.writes, *choice.token_ids[:-1])
            found = rows.positions.tolist()
            hold(found == places, f"positions {positions!r} were asked for, rows stand at {found}")
            right = subject.reference.rows(sequence)[:, places]
            _hold_layers(rows.values, right, subject.tolerance, f"positions {positions!r}")

    def test_steering_by_nothing_changes_nothing(self, subject: EngineSubject) -> None:
        """A scale of 0 is the identity: the same text, the same rows."""
        if (engine := _steered(subject)) is None:
            return
        plain = _answer(engine, _request(subject, subject.writes), subject)
        nothing = _vector(subject, 0.0)
        steered = _answer(engine, _request(subject, subject.writes, steering=[nothing]), subject)
        hold(steered.token_ids == plain.token_ids, "a vector of scale 0 changes what is written")
        _hold_layers(_rows(steered).values, _rows(plain).values, subject.between_runs, "steered by nothing")

    def test_steering_adds_the_vector_and_nothing_below_it(self, subject: EngineSubject) -> None:
        """At its layer the difference is scale times the vector, at generated positions too; above, all changes."""
        if (engine := _steered(subject)) is None:
            return
        vector = _vector(subject, 0.5)
        steered = _answer(engine, _request(subject, subject.writes, steering=[vector]), subject)
        sequence = (*subject.writes, *steered.token_ids[:-1])
        plain = _answer(engine, _request(subject, sequence, max_tokens=1), subject)
        _hold_pushed(subject, _rows(steered), _rows(plain), vector.scale * vector.vectors[0])

    def test_vectors_add_up(self, subject: EngineSubject) -> None:
        """Two at one layer are their sum."""
        if (engine := _steered(subject)) is None:
            return
        both = [_vector(subject, 0.5), _vector(subject, -0.75, seed=1)]
        steered = _answer(engine, _request(subject, subject.writes, max_tokens=1, steering=both), subject)
        plain = _answer(engine, _request(subject, subject.writes, max_tokens=1), subject)
        total = np.sum([each.scale * each.vectors[0] for each in both], axis=0)
        _hold_pushed(subject, _rows(steered), _rows(plain), total)

    def test_a_matched_norm_goes_by_each_row(self, subject: EngineSubject) -> None:
        """``h + scale * v * |h| / (|v| + 1e-6)``, or it is refused."""
        vector = replace(_vector(subject, 0.5), norm_match=True)

        def push(rows: Floats) -> Floats:
            own = float(np.linalg.norm(vector.vectors[0])) + 1e-6
            pushed: Floats = vector.scale * vector.vectors[0] * np.linalg.norm(rows, axis=1, keepdims=True) / own
            return pushed

        _hold_push_or_refusal(subject, vector, push)

    def test_spans_are_steered_alone(self, subject: EngineSubject) -> None:
        """Positions inside the span and no others, or it is refused."""
        vector = replace(_vector(subject, 0.5), spans=((2, 4),))

        def push(rows: Floats) -> Floats:
            pushed = np.zeros_like(rows)
            pushed[2:4] = vector.scale * vector.vectors[0]
            return pushed

        _hold_push_or_refusal(subject, vector, push)

    def test_each_position_takes_its_own_vector(self, subject: EngineSubject) -> None:
        """One vector for each of two positions, or it is refused."""
        own = np.stack([_vector(subject, 1.0, seed=seed).vectors[0] for seed in (2, 3)])
        vector = SteeringVector((_layer(subject),), own[None], 0.5, positions=(1, 3))

        def push(rows: Floats) -> Floats:
            pushed = np.zeros_like(rows)
            pushed[[1, 3]] = vector.scale * own
            return pushed

        _hold_push_or_refusal(subject, vector, push)

    def test_steering_stays_with_its_request(self, subject: EngineSubject) -> None:
        """One that runs beside it has the rows of the model."""
        if (engine := _steered(subject)) is None:
            return
        steered = _request(subject, subject.writes, steering=[_vector(subject, 1.0)])
        requests = [steered, _request(subject, subject.writes), steered]
        _, plain, _ = (_wait(inbox, subject) for inbox in [_submit(engine, request) for request in requests])
        sequence = (*subject.writes, *plain.token_ids[:-1])
        _hold_layers(_rows(plain).values, subject.reference.rows(sequence), subject.tolerance, "beside a steered one")

    def test_completions_at_once_have_their_own_rows(self, subject: EngineSubject) -> None:
        """Requests run together, each as if it were alone."""
        if (engine := _completer(subject)) is None:
            return
        prompts = [subject.writes, *subject.prompts[:2]]
        inboxes = [_submit(engine, _request(subject, prompt, max_tokens=2)) for prompt in prompts]
        for prompt, choice in zip(prompts, [_wait(inbox, subject) for inbox in inboxes], strict=True):
            hold(choice.prompt_ids == prompt, "the answer is another prompt's")
            sequence = (*prompt, *choice.token_ids[:-1])
            _hold_layers(_rows(choice).values, subject.reference.rows(sequence), subject.tolerance, "at once")

    def test_a_cancelled_completion_is_silent(self, subject: EngineSubject) -> None:
        """Nothing is emitted after ``cancel`` returned, and the next one runs."""
        if (engine := _completer(subject)) is None:
            return
        most = min(200, (subject.engine.tokenizer.context_length or 64) - len(subject.writes))
        request = replace(_request(subject, subject.writes, max_tokens=most), capture=None, stream=True)
        inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        cancel = engine.submit(request, inbox.put)
        first = inbox.get(timeout=subject.timeout_seconds)
        hold(not isinstance(first, Failed), "a completion failed")
        cancel()
        while not inbox.empty():
            inbox.get()
        time.sleep(_SILENT_SECONDS)
        hold(inbox.empty(), "something was emitted after the request was cancelled")
        choice = _answer(engine, _request(subject, subject.writes, max_tokens=1), subject)
        _hold_layers(_rows(choice).values, subject.reference.rows(subject.writes), subject.tolerance, "after a cancel")

    def test_completions_that_cannot_be_are_refused(self, subject: EngineSubject) -> None:
        """By class, at once, with nothing queued."""
        if (engine := _completer(subject)) is None:
            return
        good, tokenizer = _request(subject, subject.writes, max_tokens=1), subject.engine.tokenizer
        beyond = CaptureAsk((subject.n_layers,), "all", "float32")
        bad: list[tuple[type[StreamtapError], CompletionRequest]] = [
            (InvalidInput, replace(good, prompts=())),
            (EmptyPrompt, replace(good, prompts=((),))),
            (InvalidPrompt, replace(good, prompts=((tokenizer.vocabulary or 0,),))),
            (PromptTooLong, replace(good, prompts=((subject.writes[0],) * ((tokenizer.context_length or 0) + 1),))),
            (InvalidInput, replace(good, capture=beyond)),
            (InvalidInput, replace(good, capture=replace(beyond, layers=()))),
        ]
        for kind, request in bad:
            _hold_refused(engine, request, kind)

    def test_vectors_that_cannot_be_are_refused(self, subject: EngineSubject) -> None:
        """Of another width, at a layer that there is not, or any at all where the engine does not steer."""
        if (engine := _completer(subject)) is None:
            return
        vector, good = _vector(subject, 1.0), _request(subject, subject.writes, max_tokens=1)
        if not subject.steers:
            _hold_refused(engine, replace(good, steering=(vector,)), SteeringUnsupported)
        wide = np.ones((1, subject.hidden + 1), np.float32)
        for bad in (replace(vector, vectors=wide), replace(vector, layers=(subject.n_layers,))):
            _hold_refused(engine, replace(good, steering=(bad,)), (InvalidInput, SteeringUnsupported))


def _completer(subject: EngineSubject) -> Completes | None:
    """The engine as one that completes, or None where it is held not to."""
    engine = subject.engine
    completes = isinstance(engine, Completes)
    hold(completes == subject.completes, f"the engine {'is' if completes else 'is not'} a Completes")
    hold(hasattr(engine, "submit") == subject.completes, "an engine that does not complete has `submit`")
    return engine if isinstance(engine, Completes) else None


def _steered(subject: EngineSubject) -> Completes | None:
    """The engine as one that steers, or None where it is held to refuse that."""
    engine = _completer(subject)
    if engine is not None and not subject.steers:
        request = _request(subject, subject.writes, max_tokens=1, steering=[_vector(subject, 1.0)])
        _hold_refused(engine, request, SteeringUnsupported)
        return None
    return engine


def _request(
    subject: EngineSubject,
    prompt: Ids,
    *,
    max_tokens: int = _NEW_TOKENS,
    positions: CapturedPositions = "all",
    steering: Sequence[SteeringVector] = (),
) -> CompletionRequest:
    """A greedy request for every layer in float32."""
    ask = CaptureAsk(tuple(range(subject.n_layers)), positions, "float32")
    greedy = Sampling(temperature=0.0)
    return CompletionRequest((prompt,), max_tokens, sampling=greedy, capture=ask, steering=tuple(steering))


def _submit(engine: Completes, request: CompletionRequest) -> queue.SimpleQueue[Event]:
    inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
    engine.submit(request, inbox.put)
    return inbox


def _wait(inbox: queue.SimpleQueue[Event], subject: EngineSubject) -> Choice:
    try:
        event = inbox.get(timeout=subject.timeout_seconds)
    except queue.Empty as error:
        raise AssertionError(f"no answer came in {subject.timeout_seconds} seconds") from error
    if isinstance(event, Failed):
        raise event.error
    hold(isinstance(event, Finished), f"{type(event).__name__} came of a request that does not stream")
    choices = event.choices if isinstance(event, Finished) else ()
    hold(len(choices) == 1, f"{len(choices)} choices came of one prompt")
    return choices[0]


def _answer(engine: Completes, request: CompletionRequest, subject: EngineSubject) -> Choice:
    return _wait(_submit(engine, request), subject)


def _rows(choice: Choice) -> Rows:
    rows = choice.rows
    if rows is None:
        raise AssertionError("rows were asked for and did not come")
    hold(rows.values.dtype == np.float32, f"rows in float32 were asked for, they came in {rows.values.dtype}")
    return rows


def _layer(subject: EngineSubject) -> int:
    """Where the suite steers: blocks stand below and above it."""
    return subject.n_layers // 2


def _vector(subject: EngineSubject, scale: float, *, seed: int = 0) -> SteeringVector:
    """A direction about as long as the rows that it is added to."""
    layer = _layer(subject)
    rows = subject.reference.rows(subject.writes)[layer]
    drawn = np.random.default_rng(seed).standard_normal((1, subject.hidden))
    length = float(np.median(np.linalg.norm(rows, axis=1)))
    return SteeringVector((layer,), (drawn / np.linalg.norm(drawn) * length).astype(np.float32), scale)


def _hold_layers(found: Floats, right: Floats, tolerance: float, what: str) -> None:
    hold(len(found) == len(right), f"{what}: {len(found)} layers came, expected {len(right)}")
    for layer, (rows, expected) in enumerate(zip(found, right, strict=True)):
        hold_rows(rows, expected, tolerance, f"{what}, at layer {layer}")


def _hold_pushed(subject: EngineSubject, steered: Rows, plain: Rows, push: Floats) -> None:
    """Hold ``steered`` to be ``plain`` with ``push`` [hidden] or [rows, hidden] added at the steered layer."""
    layer, allowed = _layer(subject), subject.between_runs
    hold(steered.values.shape == plain.values.shape, f"{steered.values.shape} steered, {plain.values.shape} plain")
    _hold_layers(steered.values[:layer], plain.values[:layer], allowed, "below the steered layer")
    before, after = (each.values[layer].astype(np.float64) for each in (plain, steered))
    pushes = np.broadcast_to(push, before.shape)
    scale = np.linalg.norm(before, axis=1) + np.linalg.norm(pushes, axis=1)
    away = np.linalg.norm(after - before - pushes, axis=1) / scale
    hold(bool((away <= allowed).all()), f"rows at layer {layer} are {away.tolist()} away from plain rows and vector")
    above = np.abs(steered.values[layer + 1 :] - plain.values[layer + 1 :])
    moved = above[:, np.linalg.norm(pushes, axis=1) > 0].max(axis=(1, 2), initial=0)
    hold(bool((moved > 0).all()), f"layers above {layer} do not feel the vector: they move by {moved.tolist()}")


def _hold_push_or_refusal(subject: EngineSubject, vector: SteeringVector, push: Callable[[Floats], Floats]) -> None:
    if (engine := _steered(subject)) is None:
        return
    request = _request(subject, subject.writes, max_tokens=1, steering=[vector])
    try:
        inbox = _submit(engine, request)
    except SteeringUnsupported:
        return
    steered = _rows(_wait(inbox, subject))
    plain = _rows(_answer(engine, replace(request, steering=()), subject))
    _hold_pushed(subject, steered, plain, push(plain.values[_layer(subject)]))


def _hold_refused(
    engine: Completes, request: CompletionRequest, kind: type[StreamtapError] | tuple[type[StreamtapError], ...]
) -> None:
    inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
    refused(kind, lambda: engine.submit(request, inbox.put))
    time.sleep(_SILENT_SECONDS / 10)
    hold(inbox.empty(), "something was emitted of a request that was refused")
