"""Many requests at once, each as if it were alone."""

from __future__ import annotations

import queue
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from streamtap.completion import CaptureAsk, CompletionRequest, Event, Failed, Finished, Sampling, SteeringVector
from streamtap.engines.transformers import TransformersEngine
from streamtap.errors import InvalidInput
from streamtap.testing.models import FAMILIES, MIXTURES, tiny_model
from streamtap.testing.reference import plain_logits, plain_rows
from streamtap.testing.tokenizers import tiny_tokenizer

GREEDY = Sampling(temperature=0)
ALL = CaptureAsk((0, 1, 2), "all", "float32")


def _ask(prompt: str | tuple[int, ...], max_tokens: int = 6, **fields: Any) -> CompletionRequest:
    return CompletionRequest((prompt,), max_tokens, **{"sampling": GREEDY, **fields})


def _greedy(model: Any, ids: list[int], n: int, end: int = 1) -> list[int]:
    made: list[int] = []
    while len(made) < n and end not in made:
        made.append(int(plain_logits(model, ids + made)[-1].argmax()))
    return made


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in MIXTURES])
def test_tokens_and_rows_are_the_plain_models(family: str, together: Any) -> None:
    model = tiny_model(family)
    engine = TransformersEngine(model, tiny_tokenizer())
    requests = [_ask(prompt, capture=ALL) for prompt in ("The quick brown fox", "jumps", "over it all, twice")]

    for finished in together(engine, requests):
        choice = finished.choices[0]
        ids = list(choice.prompt_ids)
        end = model.generation_config.eos_token_id
        assert list(choice.token_ids) == _greedy(model, ids, 6, -1 if end is None else end)
        plain = plain_rows(model, [*ids, *choice.token_ids[:-1]])
        assert choice.rows is not None
        assert choice.rows.values.shape == (3, finished.usage.total_tokens - 1, 32)
        for layer in range(3):
            assert _gap(choice.rows.values[layer], plain[layer].numpy()) < 3e-5
    engine.close()


def test_what_a_request_gets_does_not_depend_on_its_neighbours(engine: TransformersEngine, together: Any) -> None:
    push = SteeringVector((1,), np.ones((1, 32), np.float32), scale=2.0)
    requests = [
        _ask("greedy, captured", capture=ALL),
        _ask("drawn with a seed", 12, sampling=Sampling(seed=7)),
        _ask("steered and captured", capture=replace(ALL, layers=(0, 2)), steering=(push,)),
        _ask("two samples", 8, n=2, sampling=Sampling(seed=3, top_p=0.9, temperature=1.5)),
        _ask("a prompt alone", 1, capture=replace(ALL, positions="last")),
        _ask("penalties", 10, sampling=Sampling(temperature=0, repetition_penalty=1.3, frequency_penalty=0.5)),
    ]

    alone = [together(engine, [request])[0] for request in requests]
    at_once = together(engine, requests * 3)

    for place, answer in enumerate(at_once):
        for mine, other in zip(answer.choices, alone[place % 6].choices, strict=True):
            assert (mine.text, mine.token_ids, mine.finish_reason) == (other.text, other.token_ids, other.finish_reason)
            if mine.rows is not None and other.rows is not None:
                assert _gap(mine.rows.values, other.rows.values) < 1e-5


def test_samples_of_one_seed_differ_and_repeat(engine: TransformersEngine, together: Any) -> None:
    request = _ask("tell me", 12, n=3, sampling=Sampling(seed=11))

    first, second = together(engine, [request, request])

    texts = [choice.text for choice in first.choices]
    assert len(set(texts)) == 3
    assert texts == [choice.text for choice in second.choices]
    assert texts[0] == together(engine, [replace(request, n=1)])[0].choices[0].text


def test_prompts_of_a_batch_draw_as_they_would_alone(engine: TransformersEngine, together: Any) -> None:
    sampling = Sampling(seed=5)
    batch = CompletionRequest(("one prompt", "another"), 8, n=2, sampling=sampling)

    (answer,) = together(engine, [batch])
    (alone,) = together(engine, [_ask("another", 8, n=2, sampling=sampling)])

    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices[2:]] == [choice.text for choice in alone.choices]
    assert answer.usage.prompt_tokens == 11 + 8
    assert answer.usage.completion_tokens == sum(len(choice.token_ids) for choice in answer.choices)


def test_token_ids_are_used_as_they_are(engine: TransformersEngine, together: Any) -> None:
    (answer,) = together(engine, [_ask((5, 6, 7), 1, capture=ALL)])

    assert answer.choices[0].prompt_ids == (5, 6, 7)
    assert answer.choices[0].rows is not None
    assert answer.choices[0].rows.token_ids.tolist() == [5, 6, 7]


@pytest.mark.parametrize("special", [True, False])
def test_special_tokens_are_added_only_where_they_are_wanted(
    engine: TransformersEngine, together: Any, special: bool
) -> None:
    (answer,) = together(engine, [_ask("abc", 1, add_special_tokens=special)])

    assert len(answer.choices[0].prompt_ids) == 3 + special


def test_the_last_rows_of_the_last_block_give_the_next_token(engine: TransformersEngine, together: Any) -> None:
    (answer,) = together(engine, [_ask("what comes next", 5, capture=CaptureAsk((2,), "all", "float32"))])
    choice, model = answer.choices[0], engine.model
    assert choice.rows is not None

    logits = model.lm_head(model.model.norm(torch.from_numpy(choice.rows.values[0])))

    first_new = len(choice.prompt_ids) - 1
    assert logits.argmax(dim=-1)[first_new:].tolist() == list(choice.token_ids)


@pytest.mark.parametrize(
    ("positions", "wanted"),
    [
        ("prompt", [0, 1, 2, 3]),
        ("generated", [4, 5, 6, 7]),
        ("last", [7]),
        ((1, 5, 7), [1, 5, 7]),
    ],
)
def test_chosen_positions_are_the_same_rows_of_all(
    engine: TransformersEngine, together: Any, positions: Any, wanted: list[int]
) -> None:
    whole, some = together(
        engine, [_ask("abc", 5, capture=ALL), _ask("abc", 5, capture=CaptureAsk((0, 2), positions, "float32"))]
    )
    every, rows = whole.choices[0].rows, some.choices[0].rows
    assert every is not None
    assert rows is not None

    assert rows.positions.tolist() == wanted
    assert _gap(rows.values, every.values[[0, 2]][:, wanted]) < 1e-5
    assert rows.token_ids.tolist() == every.token_ids[wanted].tolist()


def test_bfloat16_rows_are_the_rounded_ones(engine: TransformersEngine, together: Any) -> None:
    wide, narrow = together(
        engine, [_ask("abc", 3, capture=ALL), _ask("abc", 3, capture=replace(ALL, dtype="bfloat16"))]
    )

    assert narrow.choices[0].rows.values.dtype.name == "bfloat16"
    assert _gap(narrow.choices[0].rows.values.astype(np.float32), wide.choices[0].rows.values) < 2**-8


def test_a_prompt_alone_can_run_without_a_token(engine: TransformersEngine, together: Any) -> None:
    (answer,) = together(engine, [_ask("abc", 0, capture=ALL, echo=True, logprobs=1)])
    choice = answer.choices[0]

    assert (choice.text, choice.token_ids, choice.finish_reason) == ("abc", (), "length")
    assert choice.rows.values.shape == (3, 4, 32)
    assert [log.logprob is None for log in choice.logs] == [True, False, False, False]


def test_logs_of_prompt_and_text_are_the_models_own(engine: TransformersEngine, together: Any) -> None:
    (answer,) = together(engine, [_ask("hello", 3, echo=True, logprobs=2, prompt_logprobs=-1)])
    choice = answer.choices[0]
    ids = [*choice.prompt_ids, *choice.token_ids]
    wanted = torch.log_softmax(plain_logits(engine.model, ids), dim=-1)

    assert [log.token_id for log in choice.logs] == ids
    for position, log in enumerate(choice.logs[1:], 1):
        assert log.logprob == pytest.approx(float(wanted[position - 1, ids[position]]), abs=1e-4)
        assert [each[0] for each in log.top] == wanted[position - 1].topk(2).indices.tolist()
    assert len(choice.prompt_logs) == 6
    assert len(choice.prompt_logs.at(3).top) == 97
    offsets = [log.offset for log in choice.logs]
    assert offsets == sorted(offsets)


def test_a_stop_string_ends_the_text_before_it(engine: TransformersEngine, together: Any) -> None:
    (whole,) = together(engine, [_ask("go on", 12)])
    text = whole.choices[0].text
    stop = text[3:6]

    (answer,) = together(engine, [_ask("go on", 12, stop=(stop,), capture=ALL)])
    choice = answer.choices[0]

    assert choice.text == text[: text.index(stop)]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    assert choice.rows.values.shape[1] == len(choice.prompt_ids) + len(choice.token_ids) - 1


def test_an_end_token_ends_the_text() -> None:
    model = tiny_model("llama")
    first = _greedy(model, [0, 40, 41], 3, -1)
    model.generation_config.eos_token_id = [first[2], 96]
    engine = TransformersEngine(model, tiny_tokenizer())

    choice = engine.complete([0, 40, 41], max_tokens=9, temperature=0).choices[0]

    assert list(choice.token_ids) == first
    assert (choice.finish_reason, choice.stop_reason) == ("stop", first[2])
    engine.close()


def test_deltas_join_to_the_text(engine: TransformersEngine) -> None:
    deltas = list(engine.stream("say", max_tokens=9, temperature=0, echo=True))
    whole = engine.complete("say", max_tokens=9, temperature=0, echo=True)

    assert "".join(delta.text for delta in deltas) == whole.text
    assert [delta.finish_reason for delta in deltas] == [None] * 9 + ["length"]


def test_every_choice_of_a_stream_has_its_last_delta(engine: TransformersEngine) -> None:
    request = CompletionRequest(("one prompt", "another"), 3, n=2, sampling=Sampling(seed=5), stop=("no such",))
    inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
    engine.submit(replace(request, stream=True), inbox.put)
    events: list[Any] = []
    while not (events and isinstance(events[-1], Finished)):
        events.append(inbox.get(timeout=30))

    for choice in events[-1].choices:
        mine = [event for event in events[:-1] if event.index == choice.index]
        assert "".join(delta.text for delta in mine) == choice.text
        assert [delta.finish_reason for delta in mine] == [None] * (len(mine) - 1) + [choice.finish_reason]


def test_no_more_sequences_are_in_their_text_than_the_limit(engine: TransformersEngine, monkeypatch: Any) -> None:
    from streamtap.engines.generation import generator

    monkeypatch.setattr(generator, "MOST_RUNNING", 3)
    stepper, sizes = engine._generation()._stepper, []
    real = stepper.run

    def counting(members: Any) -> Any:
        outcomes = real(members)
        sizes.append(len(outcomes))
        return outcomes

    monkeypatch.setattr(stepper, "run", counting)
    request = CompletionRequest(("a", "b", "c", "d", "e"), 4, n=2, sampling=GREEDY)

    assert len(engine.complete(request).choices) == 10
    assert max(sizes) == 2


@pytest.mark.parametrize(("counts", "steps"), [((4, 4, 2), [10]), ((4, 4, 3), [8, 3]), ((9, 1), [10]), ((12,), [12])])
def test_a_step_leaves_no_small_rest(counts: tuple[int, ...], steps: list[int], monkeypatch: Any) -> None:
    engine = TransformersEngine(tiny_model("llama"), tiny_tokenizer(), max_batch_tokens=8)
    stepper, seen = engine._generation()._stepper, []
    real = stepper.run

    def counting(members: Any) -> Any:
        seen.append(sum(len(member.sequence.prompt_ids) for member in members))
        return real(members)

    monkeypatch.setattr(stepper, "run", counting)
    prompts = tuple(tuple(range(5, 5 + count)) for count in counts)

    engine.complete(CompletionRequest(prompts, 1, sampling=GREEDY))
    engine.close()

    assert seen == steps


def test_whoever_leaves_a_stream_stops_the_work(engine: TransformersEngine) -> None:
    stream = engine.stream("for ever", max_tokens=200)
    next(stream)
    stream.close()

    assert _settles(lambda: engine._generation().live == 0)


def test_a_cancelled_request_says_nothing_more_and_its_neighbour_goes_on(engine: TransformersEngine) -> None:
    left: queue.SimpleQueue[Event] = queue.SimpleQueue()
    stays: queue.SimpleQueue[Event] = queue.SimpleQueue()
    cancel = engine.submit(replace(_ask("for ever", 200), stream=True), left.put)
    engine.submit(_ask("a while", 20), stays.put)
    left.get(timeout=30)

    cancel()
    heard = left.qsize()

    assert isinstance(stays.get(timeout=30), Finished)
    assert left.qsize() == heard
    assert _settles(lambda: engine._generation().live == 0)


def test_a_closed_engine_says_so() -> None:
    engine = TransformersEngine(tiny_model("llama"), tiny_tokenizer())
    inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
    engine.submit(_ask("for ever", 200), inbox.put)
    engine.close()

    event = inbox.get(timeout=30)
    assert isinstance(event, Failed)
    assert event.error.code == "server_restarting"
    with pytest.raises(InvalidInput, match="closed"):
        engine.submit(_ask("more"), inbox.put)


def _settles(holds: Any) -> bool:
    deadline = time.monotonic() + 10
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(holds())


def _gap(got: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> float:
    assert got.shape == wanted.shape
    a, b = got.astype(np.float64), wanted.astype(np.float64)
    return float((np.linalg.norm(a - b, axis=-1) / np.linalg.norm(b, axis=-1)).max())
