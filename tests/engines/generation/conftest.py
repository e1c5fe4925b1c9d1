"""Tiny engines with large random weights, and a way to run many requests at once."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence

import pytest

from streamtap.completion import CompletionRequest, Delta, Event, Failed, Finished
from streamtap.engines.transformers import TransformersEngine
from streamtap.testing.models import tiny_model
from streamtap.testing.tokenizers import tiny_tokenizer

TogetherFunction = Callable[[TransformersEngine, Sequence[CompletionRequest]], list[Finished]]


@pytest.fixture(scope="module")
def engine() -> Iterator[TransformersEngine]:
    """A tiny Llama whose texts seldom end by themselves."""
    made = TransformersEngine(tiny_model("llama"), tiny_tokenizer())
    yield made
    made.close()


@pytest.fixture(scope="session")
def together() -> TogetherFunction:
    """Run requests at once and give their answers in order; an error of one is raised."""

    def run(engine: TransformersEngine, requests: Sequence[CompletionRequest]) -> list[Finished]:
        inboxes: list[queue.SimpleQueue[Event]] = [queue.SimpleQueue() for _ in requests]
        for request, inbox in zip(requests, inboxes, strict=True):
            engine.submit(request, inbox.put)
        return [_answer(inbox) for inbox in inboxes]

    return run


def _answer(inbox: queue.SimpleQueue[Event]) -> Finished:
    while isinstance(event := inbox.get(timeout=60), Delta):
        pass
    if isinstance(event, Failed):
        raise event.error
    assert isinstance(event, Finished)
    return event
