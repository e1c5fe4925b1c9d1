"""Whatever goes wrong ends what it concerns, and the engine goes on."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from streamtap.completion import CaptureAsk, CompletionRequest, Event, Failed, Finished, Sampling, SteeringVector
from streamtap.engines.transformers import TransformersEngine
from streamtap.errors import CaptureMissed, EngineFailed, EngineOutOfMemory, SteeringNotFinite
from streamtap.testing.models import tiny_model
from streamtap.testing.tokenizers import tiny_tokenizer

ALL = CaptureAsk((0, 1, 2), "all", "float32")


def _ask(prompt: str, max_tokens: int = 6, **fields: Any) -> CompletionRequest:
    return CompletionRequest((prompt,), max_tokens, **{"sampling": Sampling(temperature=0), **fields})


def test_a_listener_that_raises_hurts_no_one_else(engine: TransformersEngine) -> None:
    heard: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def deaf(_event: Event) -> None:
        raise RuntimeError("the listener is gone")

    engine.submit(_ask("stream to no one", 20, stream=True), deaf)
    engine.submit(_ask("a neighbour", 20), heard.put)

    assert isinstance(heard.get(timeout=30), Finished)
    assert engine.complete("abc", max_tokens=1).text
    deadline = time.monotonic() + 10
    while engine._generation().live and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine._generation().live == 0


def test_what_does_not_fit_beside_a_prompt_ends_that_request_alone(
    engine: TransformersEngine, monkeypatch: Any
) -> None:
    stepper = engine._generation()._stepper
    real = stepper._read_prompt

    def cramped(sequence: Any, rows: Any) -> None:
        if sequence.prompt_logs is not None:
            raise torch.OutOfMemoryError
        real(sequence, rows)

    monkeypatch.setattr(stepper, "_read_prompt", cramped)
    inboxes = [queue.SimpleQueue[Event]() for _ in range(3)]
    for inbox, logs in zip(inboxes, (None, -1, None), strict=True):
        engine.submit(_ask("abc", 3, prompt_logprobs=logs, capture=ALL), inbox.put)
    first, failed, last = [inbox.get(timeout=30) for inbox in inboxes]

    assert isinstance(failed, Failed)
    assert isinstance(failed.error, EngineOutOfMemory)
    for event in (first, last):
        assert isinstance(event, Finished)
        assert event.choices[0].rows.positions.tolist() == list(range(6))


def test_out_of_memory_runs_the_prompts_again_in_smaller_steps(engine: TransformersEngine, monkeypatch: Any) -> None:
    generator = engine._generation()
    real, sizes = generator._stepper.run, []
    gate = threading.Event()

    def cramped(members: Any) -> Any:
        gate.wait(30)
        sizes.append(len(members))
        if sum(len(member.sequence.prompt_ids) for member in members) > 12:
            raise torch.OutOfMemoryError
        return real(members)

    monkeypatch.setattr(generator._stepper, "run", cramped)
    monkeypatch.setattr(generator, "_max_step_tokens", 512)
    inboxes = [queue.SimpleQueue[Event]() for _ in range(5)]
    for inbox in inboxes[:4]:
        engine.submit(_ask("four more", 1), inbox.put)
    engine.submit(_ask("one that is too long for it", 1), inboxes[4].put)
    gate.set()

    assert all(isinstance(inbox.get(timeout=30), Finished) for inbox in inboxes[:4])
    event = inboxes[4].get(timeout=30)
    assert isinstance(event, Failed)
    assert isinstance(event.error, EngineOutOfMemory)
    assert sizes[-1] == 1


def test_a_fault_of_the_model_ends_the_step_and_not_the_engine(engine: TransformersEngine, monkeypatch: Any) -> None:
    stepper = engine._generation()._stepper
    with monkeypatch.context() as patch:
        patch.setattr(stepper, "run", lambda _members: 1 / 0)
        with pytest.raises(EngineFailed, match="ZeroDivisionError"):
            engine.complete("abc", max_tokens=1)

    assert engine.complete("abc", max_tokens=1).text


def test_one_that_runs_off_to_infinity_fails_alone(engine: TransformersEngine) -> None:
    push = SteeringVector((1,), np.full((1, 32), 3e38, np.float32), scale=10.0)
    failing: queue.SimpleQueue[Event] = queue.SimpleQueue()
    whole: queue.SimpleQueue[Event] = queue.SimpleQueue()
    engine.submit(_ask("steered", capture=ALL, steering=(push,)), failing.put)
    engine.submit(_ask("plain", capture=ALL), whole.put)

    event = failing.get(timeout=30)
    assert isinstance(event, Failed)
    assert isinstance(event.error, SteeringNotFinite)
    assert isinstance(whole.get(timeout=30), Finished)


def test_weights_that_give_nan_are_named_by_layer() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    engine = TransformersEngine(model, tiny_tokenizer())
    # The head was checked against the model before; NaN is not its fault.
    with pytest.raises(Exception, match="not finite|relative error nan"):
        engine.complete("abc", capture=[1])
    engine.close()


def test_a_block_that_does_not_fire_fails_the_capture(engine: TransformersEngine, monkeypatch: Any) -> None:
    from streamtap.engines.generation import step

    monkeypatch.setattr(step, "_layers", lambda _members: {0})

    with pytest.raises(CaptureMissed, match="block 1 fired 0 of 1 times"):
        engine.complete("abc", capture=[0, 1])


def test_a_token_whose_embedding_is_zero_can_be_captured() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[0] = 0
    engine = TransformersEngine(model, tiny_tokenizer())

    completion = engine.complete([0], capture=[0])

    assert not completion.choices[0].rows.values.any()
    engine.close()
