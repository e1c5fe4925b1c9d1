"""The one suite of tests that every engine passes, for the tests of Streamtap and of any project that brings an engine.

A test file subclasses ``EngineSuite`` and says what it is run on with a fixture named ``subject``::

    from streamtap.testing import EngineSubject, EngineSuite, PlainReference

    class TestMyEngine(EngineSuite):
        @pytest.fixture(scope="class")
        @classmethod
        def subject(cls):
            model = tiny_model("llama")
            engine = MyEngine(model)
            yield EngineSubject(engine, PlainReference(model), completes=True)
            engine.close()

Every method ``test_…`` is then one test of that engine. ``EngineSubject`` says what may be set: tolerances, prompts,
and what the engine does not do, which it is then held to refuse by class. Nothing here imports pytest: a method takes
the subject and raises ``AssertionError``, so it may be called directly as well.

What is held to: order, ragged lengths, a prompt alone and among others, some layers or positions and all of them,
pooling, equal prompts, parts out of order, every row of every layer against the plain model in float32 and nearest to
its own block, the next token, perplexity and logits, dtype and projection, a prefix that ran before, captures that are
left, threads, refusals by class before a row comes; and, of an engine that completes, rows of generated positions,
steering, cancelling and refusals. Prompts are few and short: the whole suite asks for about a hundred short passes.
"""

from __future__ import annotations

from streamtap.errors import StreamtapError
from streamtap.testing.engine_suite_completing import CompletionSuite
from streamtap.testing.engine_suite_refusals import RefusalSuite
from streamtap.testing.engine_suite_rows import RowSuite
from streamtap.testing.engine_suite_subject import EngineSubject, PlainReference, Reference

__all__ = ["EngineSubject", "EngineSuite", "PlainReference", "Reference"]


class EngineSuite(CompletionSuite, RefusalSuite, RowSuite):
    """What every engine is held to; subclass it and give it a fixture ``subject``."""

    def test_a_closed_engine_gives_right_rows_or_an_error_of_ours(self, subject: EngineSubject) -> None:
        """``close`` may be called twice. pytest runs this after all other tests of the suite."""
        engine = subject.engine if subject.another is None else subject.another()
        engine.close()
        engine.close()
        again = EngineSubject(engine, subject.reference, subject.tolerance)
        try:
            acts = again.capture([subject.prompts[0]], layers=[0])
        except StreamtapError:
            return
        again.hold_reference(acts, [subject.prompts[0]], "after close")
