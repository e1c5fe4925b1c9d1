"""The engines' suite on engines that are right: the one in this process, and one that gives a sequence at a time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch

from streamtap.activations import Activations
from streamtap.capture.runs import TokenRun
from streamtap.engines.base import Engine
from streamtap.engines.by_sequence import BySequence, Made, SequenceRows, Wanted, chosen_rows
from streamtap.engines.tokenizing import PromptTokenizer
from streamtap.engines.transformers import TransformersEngine
from streamtap.errors import KeyRefused, NotCached, Unsupported
from streamtap.spec import CaptureSpec, PromptLike
from streamtap.testing import EngineSubject, EngineSuite, PlainReference
from streamtap.testing.engine_suite_holding import hold_rows, refused, row_errors
from streamtap.testing.models import tiny_model
from streamtap.testing.tokenizers import tiny_tokenizer


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


class SequenceEngine:
    """Gives the rows of ``inner`` a sequence at a time, the last one first; without ``whole`` no text and no head."""

    def __init__(self, inner: TransformersEngine, *, whole: bool = True) -> None:
        self._inner, self._whole = inner, whole
        self.provenance = inner.provenance
        known = inner.tokenizer
        self.tokenizer = known
        if not whole:
            self.tokenizer = PromptTokenizer(
                None, context_length=known.context_length, vocabulary=known.vocabulary, special_ids=[0, 1, 2]
            )

    def capture(
        self, prompts: Iterable[PromptLike], spec: CaptureSpec, *, ordered: bool = True
    ) -> Iterator[Activations]:
        if spec.needs_head and not self._whole:
            raise Unsupported("this engine has no head; another has.")
        return BySequence(self.provenance, self.tokenizer, self._make).capture(prompts, spec, ordered=ordered)

    def close(self) -> None:
        self._inner.close()

    def _make(self, runs: Sequence[TokenRun], wanted: Wanted) -> Iterator[Made]:
        spec = CaptureSpec(layers=wanted.layers, token_nll=wanted.nll, logits=wanted.logits, logit_top_k=wanted.top_k)
        for place in reversed(range(len(runs))):
            run = runs[place]
            (acts,) = self._inner.capture([run.token_ids], spec)
            rows = None
            if wanted.layers:
                every = np.stack([acts.acts[layer] for layer in wanted.layers])
                rows = chosen_rows(every, run, wanted.pooling)
            nll = None if acts.token_nll is None else acts.token_nll[0]
            yield place, SequenceRows(rows, nll, acts.logits, acts.logit_ids)


class TestTransformersEngine(EngineSuite):
    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls, model: Any) -> Iterator[EngineSubject]:
        def opened() -> TransformersEngine:
            return TransformersEngine(model, tiny_tokenizer(), name="tiny")

        engine = opened()
        yield EngineSubject(engine, PlainReference(model), completes=True, steers=True, another=opened)
        engine.close()


class TestSmallBatches(EngineSuite):
    """Two prompts at a time, and a prefix that runs once."""

    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls, model: Any) -> Iterator[EngineSubject]:
        engine = TransformersEngine(model, tiny_tokenizer(), name="tiny", batch_size=2, max_batch_tokens=16)
        yield EngineSubject(engine, PlainReference(model), completes=True, steers=True)
        engine.close()


class TestHalfPrecision(EngineSuite):
    """Rows in bfloat16 against the same weights in float32."""

    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls) -> Iterator[EngineSubject]:
        model = tiny_model("llama", dtype=torch.bfloat16, std=0.1)
        engine = TransformersEngine(model, tiny_tokenizer(), name="tiny")
        reference = PlainReference(deepcopy(model).float())
        yield EngineSubject(engine, reference, tolerance=0.03, score_tolerance=0.05, completes=True, steers=True)
        engine.close()


class TestEngineOfSequences(EngineSuite):
    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls, model: Any) -> Iterator[EngineSubject]:
        engine = SequenceEngine(TransformersEngine(model, tiny_tokenizer(), name="tiny"))
        yield EngineSubject(engine, PlainReference(model))
        engine.close()


class TestEngineThatRefuses(EngineSuite):
    """Token ids and rows only; whatever else is asked for is held to be refused."""

    @pytest.fixture(scope="class")
    @classmethod
    def subject(cls, model: Any) -> Iterator[EngineSubject]:
        engine = SequenceEngine(TransformersEngine(model, tiny_tokenizer(), name="tiny"), whole=False)
        yield EngineSubject(engine, PlainReference(model), text=None, scores=False, logits=False)
        engine.close()


def test_the_engines_here_are_engines(model: Any) -> None:
    assert isinstance(SequenceEngine(TransformersEngine(model)), Engine)


def test_the_suite_needs_neither_pytest_nor_torch() -> None:
    code = (
        "import sys; from streamtap.testing import EngineSuite, EngineSubject, PlainReference\n"
        "print({'pytest', 'torch', 'transformers'} & set(sys.modules))"
    )

    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_the_suite_closes_an_engine_last(request: pytest.FixtureRequest) -> None:
    """What follows would run on a closed engine."""
    of_class = [item.name for item in request.session.items if item.parent and item.parent.name == "TestSmallBatches"]

    assert not of_class or of_class[-1] == "test_a_closed_engine_gives_right_rows_or_an_error_of_ours"


def test_a_reference_runs_each_prompt_once(model: Any) -> None:
    reference, passes = PlainReference(model), []
    handle = model.register_forward_hook(lambda *_: passes.append(1))
    try:
        for _ in range(2):
            reference.rows([5, 6, 7])
            reference.logits((5, 6, 7))
    finally:
        handle.remove()

    assert len(passes) == 2
    rows, logits = reference.rows([5, 6, 7]), reference.logits([5, 6, 7])
    assert (rows.shape, rows.dtype) == ((3, 3, 32), np.float32)
    np.testing.assert_allclose(reference.finish(rows[-1]), logits, rtol=1e-4, atol=1e-4)


def test_rows_are_held_one_by_one() -> None:
    right = np.array([[3.0, 4.0], [0.3, 0.4]], np.float32)
    wrong = right + np.array([[0.0, 0.0], [0.0, 0.1]], np.float32)

    np.testing.assert_allclose(row_errors(wrong, right), [0, 0.2], rtol=1e-6)
    hold_rows(wrong, right, 0.21, "rows")
    for rows in (wrong, right[:1], right[:, :1], right * np.nan):
        with pytest.raises(AssertionError, match="rows"):
            hold_rows(rows, right, 0.19, "rows")


def test_an_error_of_another_class_is_none_that_was_expected() -> None:
    def raising() -> None:
        raise Unsupported("not here")

    assert str(refused(Unsupported, raising)) == "not here"
    with pytest.raises(AssertionError, match="expected KeyRefused or NotCached; Unsupported came: not here"):
        refused((KeyRefused, NotCached), raising)
    with pytest.raises(AssertionError, match="expected Unsupported; nothing was raised"):
        refused(Unsupported, lambda: None)
