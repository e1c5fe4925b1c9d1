"""The engines' suite can fail: each of its tests about captures fails an engine that has the fault it is for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest

from streamtap.activations import Activations
from streamtap.engines.base import Engine
from streamtap.engines.transformers import TransformersEngine
from streamtap.errors import InvalidInput, StreamtapError, Unsupported
from streamtap.ragged import offsets_of
from streamtap.spec import CaptureSpec, Projection, as_prompts
from streamtap.testing import EngineSubject, EngineSuite, PlainReference
from streamtap.testing.engine_suite_completing import CompletionSuite
from streamtap.testing.models import tiny_model
from streamtap.testing.tokenizers import tiny_tokenizer

Change = Callable[[Activations, CaptureSpec], Activations]


class Wrapped:
    """The engine ``inner``, with nothing changed; what is faulty overrides a part of it."""

    def __init__(self, inner: TransformersEngine) -> None:
        self.inner = inner
        self.provenance, self.tokenizer = inner.provenance, inner.tokenizer

    def capture(self, prompts: Any, spec: CaptureSpec, *, ordered: bool = True) -> Iterator[Activations]:
        return self.inner.capture(prompts, spec, ordered=ordered)

    def close(self) -> None:
        self.inner.close()


class Changed(Wrapped):
    """Its captures are changed on their way out, and what is asked on its way in."""

    def __init__(
        self, inner: TransformersEngine, change: Change, ask: Callable[[CaptureSpec], CaptureSpec] | None = None
    ) -> None:
        super().__init__(inner)
        self.change, self.ask = change, ask or (lambda spec: spec)

    def capture(self, prompts: Any, spec: CaptureSpec, *, ordered: bool = True) -> Iterator[Activations]:
        for part in self.inner.capture(prompts, self.ask(spec), ordered=ordered):
            yield self.change(part, spec)


class Hasty(Wrapped):
    """Loses a row where parts may come in any order."""

    def capture(self, prompts: Any, spec: CaptureSpec, *, ordered: bool = True) -> Iterator[Activations]:
        for part in self.inner.capture(prompts, spec, ordered=ordered):
            yield part if ordered else last_row_dropped(part, spec)


class PrefixCache:
    """Gives only the rows of tokens that it did not run before, as an engine with such a cache may."""

    def __init__(self) -> None:
        self.seen: set[tuple[int, ...]] = set()

    def __call__(self, acts: Activations, _spec: CaptureSpec) -> Activations:
        keep = np.ones(len(acts.token_ids), bool)
        for start in acts.offsets[:-1]:
            block = tuple(acts.token_ids[start : start + 16].tolist())
            if len(block) == 16:
                keep[start : start + 16] = block not in self.seen
                self.seen.add(block)
        return kept(acts, keep)


class Shared(Wrapped):
    """Keeps what it was asked last, for whoever comes to it."""

    def capture(self, prompts: Any, spec: CaptureSpec, *, ordered: bool = True) -> Iterator[Activations]:
        self.asked = prompts
        time.sleep(0.05)
        return self.inner.capture(self.asked, spec, ordered=ordered)


class Left(Wrapped):
    """Is busy until a capture was read to its end."""

    busy = False

    def capture(self, prompts: Any, spec: CaptureSpec, *, ordered: bool = True) -> Iterator[Activations]:
        if self.busy:
            raise Unsupported("another capture runs.")
        self.busy = True
        yield from self.inner.capture(prompts, spec, ordered=ordered)
        self.busy = False


class Misnaming(Wrapped):
    """Says of everything that is wrong that it is not offered."""

    def capture(self, prompts: Any, spec: CaptureSpec, *, ordered: bool = True) -> Iterator[Activations]:
        try:
            yield from self.inner.capture(prompts, spec, ordered=ordered)
        except InvalidInput as error:
            raise Unsupported(str(error)) from error


class Late(Wrapped):
    """Looks at a prompt when it comes to it."""

    def capture(self, prompts: Any, spec: CaptureSpec, *, ordered: bool = True) -> Iterator[Activations]:
        for prompt in prompts:
            yield from self.inner.capture([prompt], spec, ordered=ordered)


class Stuck(Wrapped):
    """Gives the rows of something else once it has refused a prompt."""

    refused = False

    def capture(self, prompts: Any, spec: CaptureSpec, *, ordered: bool = True) -> Iterator[Activations]:
        try:
            for part in self.inner.capture(prompts, spec, ordered=ordered):
                yield shifted(part, 1.0) if self.refused else part
        except InvalidInput:
            self.refused = True
            raise


class Closed(Wrapped):
    """Gives rows of nothing once it is closed."""

    closed = False

    def close(self) -> None:
        self.closed = True

    def capture(self, prompts: Any, spec: CaptureSpec, *, ordered: bool = True) -> Iterator[Activations]:
        for part in self.inner.capture(as_prompts(prompts), spec, ordered=ordered):
            yield on_rows(np.zeros_like)(part, spec) if self.closed else part


class ClosedOnce(Wrapped):
    """May not be closed again."""

    closed = False

    def close(self) -> None:
        if self.closed:
            raise InvalidInput("closed twice.")
        self.closed = True


def kept(acts: Activations, keep: Any) -> Activations:
    """``acts`` without some of its rows."""
    counts = [int(keep[start:stop].sum()) for start, stop in zip(acts.offsets[:-1], acts.offsets[1:], strict=True)]
    rows = {layer: values[keep] for layer, values in acts.acts.items()}
    return replace(
        acts, acts=rows, offsets=offsets_of(counts), token_ids=acts.token_ids[keep], positions=acts.positions[keep]
    )


def shifted(acts: Activations, by: float) -> Activations:
    return replace(acts, acts={layer: rows + np.float32(by) for layer, rows in acts.acts.items()})


def on_rows(change: Callable[[Any], Any]) -> Change:
    return lambda acts, _spec: replace(acts, acts={layer: change(rows) for layer, rows in acts.acts.items()})


def on_layers(source: Callable[[tuple[int, ...], int], int]) -> Change:
    """Each layer is given the rows of ``source(layers, place)``."""

    def change(acts: Activations, _spec: CaptureSpec) -> Activations:
        layers = acts.layers
        return replace(acts, acts={layer: acts.acts[source(layers, place)] for place, layer in enumerate(layers)})

    return change


def last_row_dropped(acts: Activations, _spec: CaptureSpec) -> Activations:
    keep = np.ones(len(acts.token_ids), bool)
    keep[-1] = False
    return kept(acts, keep)


def last_row_doubled(acts: Activations, _spec: CaptureSpec) -> Activations:
    rows = np.arange(len(acts.token_ids) + 1).clip(max=len(acts.token_ids) - 1)
    return replace(
        acts,
        acts={layer: values[rows] for layer, values in acts.acts.items()},
        offsets=offsets_of([*np.diff(acts.offsets[:-1]).tolist(), int(acts.offsets[-1] - acts.offsets[-2]) + 1]),
        token_ids=acts.token_ids[rows],
        positions=acts.positions[rows],
    )


def where_exact(change: Change) -> Change:
    return lambda acts, spec: change(acts, spec) if spec.exact else acts


def swapped(acts: Activations, _spec: CaptureSpec) -> Activations:
    return replace(acts.select(np.arange(len(acts))[::-1]), index=acts.index)


def crowded(acts: Activations, _spec: CaptureSpec) -> Activations:
    return shifted(acts, 0.5 * (len(acts) > 1))


def merged(acts: Activations, _spec: CaptureSpec) -> Activations:
    """Of equal prompts only the first."""
    own = {acts.prompt(i)[0].tobytes(): i for i in reversed(range(len(acts)))}
    return acts.select(sorted(own.values()))


def at_other_positions(acts: Activations, spec: CaptureSpec) -> Activations:
    return acts if spec.positions == "all" else on_rows(lambda rows: np.roll(rows, 1, axis=0))(acts, spec)


def named_pooling(acts: Activations, spec: CaptureSpec) -> Activations:
    return replace(acts, pooling=spec.pooling)


def costlier(acts: Activations, _spec: CaptureSpec) -> Activations:
    return replace(acts, token_nll=tuple(each + 0.1 for each in acts.token_nll or ()))


def rolled_logits(acts: Activations, _spec: CaptureSpec) -> Activations:
    return replace(acts, logits=None if acts.logits is None else np.roll(acts.logits, 1, axis=-1))


def unchanged(acts: Activations, _spec: CaptureSpec) -> Activations:
    return acts


def changed(change: Change, ask: Callable[[CaptureSpec], CaptureSpec] | None = None) -> Callable[..., Engine]:
    return lambda inner: Changed(inner, change, ask)


def of_other_texts(inner: TransformersEngine) -> Engine:
    engine = Wrapped(TransformersEngine(inner.model, tiny_tokenizer(adds_bos=False)))
    engine.tokenizer = inner.tokenizer
    return engine


def of_another_dtype(inner: TransformersEngine) -> Engine:
    engine = Wrapped(inner)
    engine.provenance = replace(inner.provenance, dtype="bfloat16")
    return engine


def normed(inner: TransformersEngine) -> Engine:
    """The last block's rows behind the final norm, as ``hidden_states`` of transformers has them."""
    import torch

    norm, last = inner.model.get_submodule("model.norm"), inner.n_layers - 1

    def change(acts: Activations, _spec: CaptureSpec) -> Activations:
        with torch.no_grad():
            rows = norm(torch.from_numpy(acts.acts[last])).numpy()
        return replace(acts, acts=acts.acts | {last: rows})

    return Changed(inner, change)


def doubled(spec: CaptureSpec) -> CaptureSpec:
    return spec if spec.projection is None else replace(spec, projection=Projection(2 * spec.projection.directions))


class Fault(NamedTuple):
    engine: Callable[[TransformersEngine], Engine]
    test: str
    options: Mapping[str, Any] = MappingProxyType({})


#: However far a row may be from the reference, it must be nearest to its own block's.
LAX = {"tolerance": 1e9}
FAULTS: dict[str, Fault] = {
    "dtype that is not so": Fault(of_another_dtype, "test_provenance_says_what_the_rows_come_from"),
    "last row dropped": Fault(changed(last_row_dropped), "test_every_token_of_prompts_of_other_lengths_has_a_row"),
    "too narrow": Fault(
        changed(on_rows(lambda rows: rows[:, :-1])), "test_every_token_of_prompts_of_other_lengths_has_a_row"
    ),
    "zeros": Fault(changed(on_rows(np.zeros_like)), "test_rows_are_the_references"),
    "not finite": Fault(changed(on_rows(lambda rows: rows * np.nan)), "test_rows_are_the_references"),
    "a little off": Fault(changed(on_rows(lambda rows: rows * np.float32(1.001))), "test_rows_are_the_references"),
    "a layer too far": Fault(
        changed(on_layers(lambda layers, place: layers[min(place + 1, len(layers) - 1)])),
        "test_layer_k_is_what_block_k_puts_out",
        LAX,
    ),
    "a layer too near": Fault(
        changed(on_layers(lambda layers, place: layers[max(place - 1, 0)])),
        "test_layer_k_is_what_block_k_puts_out",
        LAX,
    ),
    "normed": Fault(normed, "test_the_last_row_leads_to_the_next_token"),
    "order swapped": Fault(changed(swapped), "test_the_order_of_prompts_is_kept"),
    "index of another": Fault(
        changed(lambda acts, _spec: replace(acts, index=acts.index[::-1])),
        "test_unordered_parts_say_whose_rows_they_are",
    ),
    "no index": Fault(
        changed(lambda acts, _spec: replace(acts, index=acts.index[:0])),
        "test_unordered_parts_say_whose_rows_they_are",
    ),
    "last row dropped where order is free": Fault(Hasty, "test_unordered_parts_say_whose_rows_they_are"),
    "rows of neighbours": Fault(
        changed(crowded), "test_a_prompt_alone_has_the_rows_that_it_has_among_others", {"tolerance": 1.0, "same": 1e-4}
    ),
    "some layers swapped": Fault(
        changed(on_layers(lambda layers, place: layers[-1 - place] if len(layers) == 2 else layers[place])),
        "test_some_layers_have_the_rows_that_they_have_among_all",
    ),
    "wrong pooling": Fault(
        changed(named_pooling, lambda spec: replace(spec, pooling="max") if spec.pooling == "mean" else spec),
        "test_pooled_rows_are_the_raw_rows_pooled",
    ),
    "all positions pooled": Fault(
        changed(unchanged, lambda spec: spec if spec.pooling == "none" else replace(spec, positions="all")),
        "test_pooled_rows_are_the_raw_rows_pooled",
    ),
    "positions shifted": Fault(
        changed(at_other_positions), "test_some_positions_have_the_rows_that_they_have_among_all"
    ),
    "equal prompts once": Fault(changed(merged), "test_equal_prompts_have_equal_rows"),
    "prefix reused": Fault(
        lambda inner: Changed(inner, PrefixCache()), "test_a_prefix_that_ran_before_has_its_rows_again"
    ),
    "another text": Fault(of_other_texts, "test_a_text_has_the_rows_of_its_tokens"),
    "text though it says none": Fault(Wrapped, "test_a_text_has_the_rows_of_its_tokens", {"text": None}),
    "dtype ignored": Fault(
        changed(unchanged, lambda spec: replace(spec, dtype=None)), "test_rows_come_in_the_dtype_that_was_asked_for"
    ),
    "products doubled": Fault(changed(unchanged, doubled), "test_products_with_directions_are_those_of_the_rows"),
    "not exact": Fault(
        changed(lambda acts, spec: shifted(acts, float(spec.exact))), "test_exact_rows_are_the_references_or_refused"
    ),
    "last row dropped where exact": Fault(
        changed(where_exact(last_row_dropped)), "test_exact_rows_are_the_references_or_refused"
    ),
    "last row doubled where exact": Fault(
        changed(where_exact(last_row_doubled)), "test_exact_rows_are_the_references_or_refused"
    ),
    "costs off": Fault(changed(costlier), "test_perplexity_is_the_references_or_refused"),
    "costs though it says none": Fault(Wrapped, "test_perplexity_is_the_references_or_refused", {"scores": False}),
    "logits rolled": Fault(changed(rolled_logits), "test_logits_are_the_references_or_refused"),
    "logits though it says none": Fault(Wrapped, "test_logits_are_the_references_or_refused", {"logits": False}),
    "busy for ever": Fault(Left, "test_a_capture_that_is_left_leaves_an_engine_that_works"),
    "one for all threads": Fault(Shared, "test_threads_at_once_get_their_own_rows"),
    "layers misnamed": Fault(Misnaming, "test_layers_that_the_model_lacks_are_refused"),
    "prompts misnamed": Fault(Misnaming, "test_prompts_that_cannot_be_are_refused_by_their_number"),
    "prompts looked at late": Fault(Late, "test_prompts_that_cannot_be_are_refused_by_their_number"),
    "positions misnamed": Fault(Misnaming, "test_a_position_outside_a_prompt_is_refused"),
    "nothing misnamed": Fault(Misnaming, "test_what_asks_for_nothing_or_the_impossible_is_refused"),
    "stuck after a refusal": Fault(Stuck, "test_an_engine_works_after_a_refusal"),
    "closed, and zeros": Fault(Closed, "test_a_closed_engine_gives_right_rows_or_an_error_of_ours"),
    "closed once only": Fault(ClosedOnce, "test_a_closed_engine_gives_right_rows_or_an_error_of_ours"),
}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def reference(model: Any) -> PlainReference:
    return PlainReference(model)


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_a_faulty_engine_fails(model: Any, reference: PlainReference, fault: Fault) -> None:
    inner = TransformersEngine(model, tiny_tokenizer(), name="tiny")
    test = getattr(EngineSuite(), fault.test)
    test(EngineSubject(Wrapped(inner), reference, many=5))  # what is right passes

    with pytest.raises((AssertionError, StreamtapError)):
        test(EngineSubject(fault.engine(inner), reference, **{"many": 5, **fault.options}))


def test_every_test_of_captures_fails_some_engine() -> None:
    tests = {name for name in dir(EngineSuite) if name.startswith("test_")} - set(dir(CompletionSuite))

    assert len(tests) > 25
    assert tests == {fault.test for fault in FAULTS.values()}


def test_it_is_said_which_layer_holds_which_block(model: Any, reference: PlainReference) -> None:
    fault = FAULTS["a layer too far"]
    subject = EngineSubject(fault.engine(TransformersEngine(model, tiny_tokenizer(), name="tiny")), reference)

    with pytest.raises(AssertionError, match="layer 0 holds what block 1 puts out"):
        EngineSuite().test_layer_k_is_what_block_k_puts_out(subject)
