from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from streamtap.completion import CompletionRequest, Event
from streamtap.engines.base import Completes
from streamtap.engines.worker.model import lower_context, warm_up
from streamtap.engines.worker.stages import LABELS, Enter, Loading
from streamtap.errors import InvalidInput, PromptTooLong, StreamtapError
from streamtap.testing.fake_completer import FakeCompleter


def _ignored(_event: Event) -> None:
    pass


class Hours:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def arrived(loading: Loading, load: Any) -> list[str]:
    """Load to the end; what ``failed`` was told."""
    told: list[str] = []
    loading.start(load, failed=lambda: told.append("failed"))
    end = time.monotonic() + 10
    while loading.engine is None and not told and time.monotonic() < end:
        time.sleep(0.005)
    return told


def test_a_stage_has_a_label_and_an_age() -> None:
    clock = Hours()
    loading = Loading(clock)
    clock.now += 2
    assert loading.view() == {"stage": "starting", "stage_label": LABELS["starting"], "stage_age_s": 2}
    loading.enter("loading_weights")
    clock.now += 0.5

    assert loading.view() == {"stage": "loading_weights", "stage_label": "Loading the weights", "stage_age_s": 0.5}


def test_an_engine_arrives() -> None:
    loading, engine = Loading(), FakeCompleter()

    def load(enter: Enter) -> Completes:
        enter("warming_up")
        return engine

    assert arrived(loading, load) == []
    assert loading.engine is engine
    assert loading.error is None


@pytest.mark.parametrize(
    ("raised", "kind", "said"),
    [
        (InvalidInput("no such model."), InvalidInput, "no such model."),
        (OSError("disk"), StreamtapError, "loading failed: OSError: disk"),
        (SystemExit(2), StreamtapError, "loading failed: SystemExit: 2"),
    ],
)
def test_whatever_keeps_it_from_loading_is_kept(raised: BaseException, kind: Any, said: str) -> None:
    loading = Loading()

    def load(_enter: Enter) -> Completes:
        raise raised

    assert arrived(loading, load) == ["failed"]
    assert type(loading.error) is kind
    assert str(loading.error) == said
    assert (loading.engine, loading.stage) == (None, "failed")


def test_warming_up_runs_one_small_request() -> None:
    engine = FakeCompleter()
    warm_up(engine)

    (request,) = engine.requests
    assert (request.prompts, request.max_tokens) == (((0,),), 2)
    assert (engine.running, engine.cancelled) == (0, 0)


def test_an_engine_that_cannot_warm_up_has_not_loaded() -> None:
    with pytest.raises(StreamtapError, match="told to fail"):
        warm_up(FakeCompleter(fault="error"))


@pytest.mark.parametrize(("asked", "context"), [(None, 2048), (16, 16), (4096, 2048)])
def test_the_context_can_be_lowered_and_not_raised(asked: int | None, context: int) -> None:
    engine = FakeCompleter()
    lower_context(engine, asked)

    assert engine.tokenizer.context_length == context
    request = CompletionRequest(prompts=("hello",), max_tokens=context - 6)
    engine.submit(request, _ignored)()
    with pytest.raises(PromptTooLong):
        engine.submit(replace(request, max_tokens=context - 5), _ignored)
