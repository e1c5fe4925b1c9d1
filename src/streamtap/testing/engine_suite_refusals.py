"""The part of the engines' suite about captures that cannot be: refused by class, before a row comes."""

from __future__ import annotations

from typing import Any

import numpy as np

from streamtap.errors import (
    EmptyPrompt,
    InvalidInput,
    InvalidLayers,
    InvalidPositions,
    InvalidPrompt,
    PromptTooLong,
    StreamtapError,
)
from streamtap.spec import CaptureSpec, Projection
from streamtap.testing.engine_suite_holding import hold, refused
from streamtap.testing.engine_suite_subject import EngineSubject


class RefusalSuite:
    """See ``EngineSuite``."""

    def test_layers_that_the_model_lacks_are_refused(self, subject: EngineSubject) -> None:
        """One too many, one too far from the end, and a word that means nothing."""
        for layers in ([subject.n_layers], -subject.n_layers - 1, "every"):
            _refused(subject, InvalidLayers, [subject.prompts[0]], layers=layers)

    def test_prompts_that_cannot_be_are_refused_by_their_number(self, subject: EngineSubject) -> None:
        """Before the good one in front of them gives a row."""
        tokenizer = subject.engine.tokenizer
        hold(tokenizer.vocabulary is not None, "the engine does not know its vocabulary")
        hold(tokenizer.context_length is not None, "the engine does not know its context")
        bad: list[tuple[type[InvalidPrompt], Any]] = [
            (EmptyPrompt, []),
            (EmptyPrompt, ""),
            (InvalidPrompt, [subject.prompts[0][0], tokenizer.vocabulary]),
            (InvalidPrompt, [-1]),
            (InvalidPrompt, 5),
            (PromptTooLong, list(subject.prompts[0][:1]) * ((tokenizer.context_length or 0) + 1)),
        ]
        for kind, prompt in bad:
            error = _refused(subject, kind, [subject.prompts[0], prompt], layers=[0])
            number = getattr(error, "index", None)
            hold(number == 1, f"{type(error).__name__} names prompt {number}; the bad one is prompt 1")

    def test_a_position_outside_a_prompt_is_refused(self, subject: EngineSubject) -> None:
        """Whatever other prompts have there."""
        shortest = min(len(prompt) for prompt in subject.prompts)
        _refused(subject, InvalidPositions, subject.prompts, layers=[0], positions=[shortest])

    def test_what_asks_for_nothing_or_the_impossible_is_refused(self, subject: EngineSubject) -> None:
        """No layer and no score; directions of another width; one text where a list is due."""
        _refused(subject, InvalidInput, [subject.prompts[0]], layers=())
        wide = Projection.onto(np.ones((1, subject.hidden + 1)))
        _refused(subject, InvalidInput, [subject.prompts[0]], layers=[0], projection=wide)
        _refused(subject, InvalidInput, "a text by itself", layers=[0])

    def test_an_engine_works_after_a_refusal(self, subject: EngineSubject) -> None:
        """Nothing of the bad prompt stays behind."""
        _refused(subject, InvalidPrompt, [subject.prompts[0], [-1]], layers=[0])

        acts = subject.capture([subject.prompts[0]], layers=[0])
        subject.hold_reference(acts, [subject.prompts[0]], "after a refusal")


def _refused(subject: EngineSubject, kind: type[StreamtapError], prompts: Any, **spec: Any) -> StreamtapError:
    """The error that comes instead of the first part."""
    asked = CaptureSpec(**spec)
    return refused(kind, lambda: next(subject.engine.capture(prompts, asked, ordered=False)))
