"""The engines' suite can fail: each of its tests about completions fails an engine that has the fault it is for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest

from streamtap.activations import Activations
from streamtap.completion import Cancel, CompletionRequest, Emit, Event, Failed, Finished, Rows, SteeringVector
from streamtap.engines.transformers import TransformersEngine
from streamtap.errors import InvalidInput, SteeringUnsupported, StreamtapError, Unsupported
from streamtap.spec import CaptureSpec
from streamtap.testing import EngineSubject, EngineSuite, PlainReference
from streamtap.testing.engine_suite_completing import CompletionSuite
from streamtap.testing.models import tiny_model
from streamtap.testing.tokenizers import tiny_tokenizer

Ask = Callable[[CompletionRequest], CompletionRequest]
ChangeRows = Callable[[Rows, CompletionRequest], Rows]


class Capturing:
    """The engine ``inner``, which does not complete."""

    def __init__(self, inner: TransformersEngine) -> None:
        self.inner = inner
        self.provenance, self.tokenizer = inner.provenance, inner.tokenizer

    def capture(self, prompts: Any, spec: CaptureSpec, *, ordered: bool = True) -> Iterator[Activations]:
        return self.inner.capture(prompts, spec, ordered=ordered)

    def close(self) -> None:
        self.inner.close()


class Completing(Capturing):
    """The same, completing; what it is asked is changed on its way in, and its rows on their way out."""

    def __init__(self, inner: TransformersEngine, ask: Ask | None = None, rows: ChangeRows | None = None) -> None:
        super().__init__(inner)
        self.ask, self.rows = ask or (lambda request: request), rows or (lambda rows, _request: rows)

    def submit(self, request: CompletionRequest, emit: Emit) -> Cancel:
        def changed(event: Event) -> None:
            if isinstance(event, Finished):
                choices = [
                    each if each.rows is None else replace(each, rows=self.rows(each.rows, request))
                    for each in event.choices
                ]
                event = replace(event, choices=tuple(choices))
            emit(event)

        return self.inner.submit(self.ask(request), changed)


class Deaf(Completing):
    """Goes on when it is cancelled."""

    def submit(self, request: CompletionRequest, emit: Emit) -> Cancel:
        super().submit(request, emit)
        return lambda: None


class Misnaming(Completing):
    """Says of everything that is wrong that it is not offered."""

    def submit(self, request: CompletionRequest, emit: Emit) -> Cancel:
        try:
            return super().submit(request, emit)
        except InvalidInput as error:
            raise Unsupported(str(error)) from error


class Tardy(Completing):
    """Tells what is wrong with a request as its answer, once it is queued."""

    def submit(self, request: CompletionRequest, emit: Emit) -> Cancel:
        try:
            return super().submit(request, emit)
        except InvalidInput as error:
            emit(Failed(error))
            return lambda: None


class Unlistening(Completing):
    """Leaves out what it cannot steer by, without a word."""

    def submit(self, request: CompletionRequest, emit: Emit) -> Cancel:
        try:
            return super().submit(request, emit)
        except InvalidInput:
            return super().submit(replace(request, steering=()), emit)


class Leaking(Completing):
    """Steers every request by the vectors of the last one that had any."""

    steering: tuple[SteeringVector, ...] = ()

    def submit(self, request: CompletionRequest, emit: Emit) -> Cancel:
        self.steering = request.steering or self.steering
        return super().submit(replace(request, steering=self.steering), emit)


class Crossing(Completing):
    """Gives a request the rows of the one before it."""

    last: Rows | None = None

    def __init__(self, inner: TransformersEngine) -> None:
        super().__init__(inner, rows=self._crossed)

    def _crossed(self, rows: Rows, _request: CompletionRequest) -> Rows:
        last, self.last = self.last, rows
        return last or rows


def steered_by(change: Callable[[SteeringVector], SteeringVector]) -> Callable[..., Completing]:
    def ask(request: CompletionRequest) -> CompletionRequest:
        return replace(request, steering=tuple(change(each) for each in request.steering))

    return lambda inner: Completing(inner, ask)


def unsteered(inner: TransformersEngine) -> Completing:
    return Completing(inner, lambda request: replace(request, steering=()))


def once(inner: TransformersEngine) -> Completing:
    """Only the first vector of a request acts."""
    return Completing(inner, lambda request: replace(request, steering=request.steering[:1]))


def lower(vector: SteeringVector) -> SteeringVector:
    return replace(vector, layers=tuple(layer - 1 for layer in vector.layers))


def some_rows(pick: Callable[[int], Any]) -> ChangeRows:
    """Rows at ``pick`` of their count."""

    def change(rows: Rows, _request: CompletionRequest) -> Rows:
        picked = pick(len(rows.positions))
        return Rows(rows.layers, rows.values[:, picked], rows.positions[picked], rows.token_ids[picked])

    return change


def prompt_only(rows: Rows, request: CompletionRequest) -> Rows:
    return some_rows(lambda _count: slice(0, len(request.prompts[0])))(rows, request)


def one_off(rows: Rows, request: CompletionRequest) -> Rows:
    """The generated rows are those of the token before."""
    values, n = rows.values.copy(), len(request.prompts[0])
    values[:, n:] = rows.values[:, n - 1 : -1]
    return replace(rows, values=values)


def elsewhere(rows: Rows, request: CompletionRequest) -> Rows:
    asked = request.capture.positions if request.capture else "all"
    return rows if asked == "all" else replace(rows, values=np.roll(rows.values, 1, axis=1))


class Fault(NamedTuple):
    engine: Callable[[TransformersEngine], Capturing]
    test: str
    options: Mapping[str, Any] = MappingProxyType({})


ADDS = "test_steering_adds_the_vector_and_nothing_below_it"
FAULTS: dict[str, Fault] = {
    "completes though it says not": Fault(
        Completing, "test_it_completes_or_says_that_it_does_not", {"completes": False}
    ),
    "says that it completes": Fault(Capturing, "test_it_completes_or_says_that_it_does_not"),
    "rows of the prompt only": Fault(
        lambda inner: Completing(inner, rows=prompt_only), "test_generated_positions_have_rows"
    ),
    "last row dropped": Fault(
        lambda inner: Completing(inner, rows=some_rows(lambda count: slice(0, count - 1))),
        "test_generated_positions_have_rows",
    ),
    "rows of the token before": Fault(
        lambda inner: Completing(inner, rows=one_off), "test_generated_positions_have_rows"
    ),
    "positions mixed up": Fault(
        lambda inner: Completing(inner, rows=elsewhere), "test_some_positions_of_a_completion_have_their_rows"
    ),
    "nothing does something": Fault(
        steered_by(lambda vector: replace(vector, scale=0.1)), "test_steering_by_nothing_changes_nothing"
    ),
    "steering ignored": Fault(unsteered, ADDS),
    "steered too much": Fault(steered_by(lambda vector: replace(vector, scale=1.01 * vector.scale)), ADDS),
    "steered too low": Fault(steered_by(lower), ADDS),
    "steered in the prompt only": Fault(steered_by(lambda vector: replace(vector, spans=((0, 6),))), ADDS),
    "one of two vectors": Fault(once, "test_vectors_add_up"),
    "norm not matched": Fault(
        steered_by(lambda vector: replace(vector, norm_match=False)), "test_a_matched_norm_goes_by_each_row"
    ),
    "steered outside the span": Fault(
        steered_by(lambda vector: replace(vector, spans=None)), "test_spans_are_steered_alone"
    ),
    "positions of others": Fault(
        steered_by(lambda vector: replace(vector, positions=(0, 2))), "test_each_position_takes_its_own_vector"
    ),
    "steering leaks": Fault(Leaking, "test_steering_stays_with_its_request"),
    "rows of another request": Fault(Crossing, "test_completions_at_once_have_their_own_rows"),
    "deaf to cancel": Fault(Deaf, "test_a_cancelled_completion_is_silent"),
    "refusals misnamed": Fault(Misnaming, "test_completions_that_cannot_be_are_refused"),
    "refusals as answers": Fault(Tardy, "test_completions_that_cannot_be_are_refused"),
    "vectors left out": Fault(Unlistening, "test_vectors_that_cannot_be_are_refused"),
    "steers though it says not": Fault(Completing, "test_vectors_that_cannot_be_are_refused", {"steers": False}),
}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def reference(model: Any) -> PlainReference:
    return PlainReference(model)


@pytest.fixture
def inner(model: Any) -> Iterator[TransformersEngine]:
    engine = TransformersEngine(model, tiny_tokenizer(), name="tiny")
    yield engine
    engine.close()


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_a_faulty_engine_fails(inner: TransformersEngine, reference: PlainReference, fault: Fault) -> None:
    test, does = getattr(EngineSuite(), fault.test), {"completes": True, "steers": True}
    test(EngineSubject(Completing(inner), reference, **does))  # what is right passes

    with pytest.raises((AssertionError, StreamtapError)):
        test(EngineSubject(fault.engine(inner), reference, **{**does, **fault.options}))


def test_every_test_of_completions_fails_some_engine() -> None:
    tests = {name for name in dir(CompletionSuite) if name.startswith("test_")}

    assert len(tests) > 10
    assert tests == {fault.test for fault in FAULTS.values()}


class Unsteering(Completing):
    """Completes, and says of every vector that it cannot."""

    def submit(self, request: CompletionRequest, emit: Emit) -> Cancel:
        if request.steering:
            raise SteeringUnsupported("this engine does not steer; backend='local' does.")
        return super().submit(request, emit)


@pytest.mark.parametrize("name", sorted(name for name in dir(CompletionSuite) if name.startswith("test_")))
def test_an_engine_that_refuses_to_steer_passes(
    inner: TransformersEngine, reference: PlainReference, name: str
) -> None:
    getattr(EngineSuite(), name)(EngineSubject(Unsteering(inner), reference, completes=True))


@pytest.mark.parametrize("name", sorted(name for name in dir(CompletionSuite) if "steer" in name or "vector" in name))
def test_an_engine_that_refuses_some_ways_to_steer_passes(
    inner: TransformersEngine, reference: PlainReference, name: str
) -> None:
    class Plainly(Completing):
        def submit(self, request: CompletionRequest, emit: Emit) -> Cancel:
            for vector in request.steering:
                if vector.norm_match or vector.spans or vector.positions:
                    raise SteeringUnsupported("only one direction for all positions; backend='local' takes more.")
            return super().submit(request, emit)

    getattr(EngineSuite(), name)(EngineSubject(Plainly(inner), reference, completes=True, steers=True))
