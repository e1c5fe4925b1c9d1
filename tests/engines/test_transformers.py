"""The engine's own promises: order, laziness, memory, threads, and going on when memory runs out."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from streamtap.activations import Activations, in_asked_order, join
from streamtap.engines import windows
from streamtap.engines.base import Engine
from streamtap.engines.transformers import TransformersEngine
from streamtap.errors import EmptyPrompt, EngineOutOfMemory, InvalidInput, InvalidPrompt
from streamtap.spec import CaptureSpec, Prompt
from streamtap.testing.models import tiny_model
from streamtap.testing.reference import plain_blocks, plain_rows, worst_row_error
from streamtap.testing.tokenizers import tiny_tokenizer

WORST = 5e-5


def ids(n: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 90, n).tolist()  # type: ignore[no-any-return]


RAGGED = [ids(n, n) for n in (3, 40, 1, 17, 60, 8, 25)]
PREFIX = ids(48, 100)
SHARED = [PREFIX + ids(n, 200 + n) for n in (5, 1, 20, 9, 17, 2)]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


def assert_plain(acts: Activations, prompts: Sequence[list[int]], model: Any) -> None:
    assert len(acts) == len(prompts)
    for i, prompt in enumerate(prompts):
        plain = plain_rows(model, prompt)
        assert all(worst_row_error(rows, plain[layer]) <= WORST for layer, rows in acts.prompt(i).items())


class Counted:
    """Sizes [prompts, tokens] of every pass through the first block, while it stands in a ``with``."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __enter__(self) -> list[tuple[int, int]]:
        self.passes: list[tuple[int, int]] = []
        self.hook = plain_blocks(self.model)[0].register_forward_hook(
            lambda _m, inputs, _o: self.passes.append(tuple(inputs[0].shape[:2]))
        )
        return self.passes

    def __exit__(self, *_: object) -> None:
        self.hook.remove()


def test_it_is_an_engine(model: Any) -> None:
    engine: Engine = TransformersEngine(model, tiny_tokenizer(), name="tiny")

    assert isinstance(engine, Engine)
    assert (engine.provenance.model, engine.provenance.n_layers, engine.provenance.hidden) == ("tiny", 3, 32)
    assert engine.provenance.dtype == "float32"
    assert engine.provenance.device == "cpu"


@pytest.mark.parametrize("limits", [{}, {"batch_size": 1}, {"batch_size": 3}, {"max_batch_tokens": 64}], ids=str)
@pytest.mark.parametrize("ordered", [True, False])
def test_rows_come_under_their_own_prompts(model: Any, limits: dict[str, Any], ordered: bool) -> None:
    prompts = [*RAGGED, *SHARED, RAGGED[3]]
    engine = TransformersEngine(model, **limits)

    parts = list(engine.capture(prompts, CaptureSpec(), ordered=ordered))

    whole = join(parts) if ordered else in_asked_order(parts)
    assert whole.index.tolist() == list(range(len(prompts)))
    assert whole.token_ids.tolist() == [token for prompt in prompts for token in prompt]
    assert_plain(whole, prompts, model)


def test_unordered_batches_come_as_they_are_done_and_say_whose_they_are(model: Any) -> None:
    engine = TransformersEngine(model, batch_size=2)
    stream = engine.capture(RAGGED, CaptureSpec(), ordered=False)

    with Counted(model) as passes:
        first = next(stream)
        assert len(passes) == 1

    assert first.index.tolist() == [4, 1]  # the longest first, so that what does not fit shows at once
    rest = list(stream)
    assert sorted(i for part in (first, *rest) for i in part.index.tolist()) == list(range(len(RAGGED)))
    assert [part.index.tolist() for part in (first, *rest)] != [[i] for i in range(len(RAGGED))]


def test_the_limits_of_a_batch_hold(model: Any) -> None:
    with Counted(model) as passes:
        list(TransformersEngine(model, batch_size=3).capture(RAGGED, CaptureSpec()))
        assert max(prompts for prompts, _ in passes) == 3
    with Counted(model) as passes:
        list(TransformersEngine(model, max_batch_tokens=80).capture(RAGGED, CaptureSpec()))
        assert max(prompts * tokens for prompts, tokens in passes) <= 80
    with Counted(model) as passes:
        list(TransformersEngine(model).capture(RAGGED, CaptureSpec(exact=True)))
        assert sorted(passes) == sorted((1, len(prompt)) for prompt in RAGGED)


@pytest.mark.parametrize("limit", ["batch_size", "max_batch_tokens"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_limit_below_one_is_refused_by_name(model: Any, limit: str, value: int) -> None:
    with pytest.raises(InvalidInput, match=f"{limit} must be at least 1; got {value}"):
        TransformersEngine(model, **{limit: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("exact", [False, True])
def test_equal_token_sequences_run_once(model: Any, exact: bool) -> None:
    engine = TransformersEngine(model, tiny_tokenizer(adds_bos=False))
    text = "the same"
    as_ids = tiny_tokenizer(adds_bos=False)(text)["input_ids"]

    with Counted(model) as passes:
        (acts,) = engine.capture([text, [5], list(as_ids), text], CaptureSpec(exact=exact))

    assert sum(prompts for prompts, _ in passes) == 2
    for i in (2, 3):
        assert all(np.array_equal(acts.prompt(i)[k], acts.prompt(0)[k]) for k in acts.layers)


@pytest.mark.parametrize(("positions", "tokens"), [("0:2", 2), ([0, 3], 4), (0, 1), (":-10", 50), ("all", 60)])
def test_nothing_behind_the_last_position_asked_for_runs(model: Any, positions: Any, tokens: int) -> None:
    prompt = RAGGED[4]

    with Counted(model) as passes:
        (acts,) = TransformersEngine(model).capture([prompt], CaptureSpec(positions=positions))

    assert passes == [(1, tokens)]
    plain = plain_rows(model, prompt)
    assert all(worst_row_error(acts.acts[k], plain[k][acts.positions.tolist()]) <= WORST for k in acts.layers)


def endless(taken: list[int]) -> Iterator[list[int]]:
    while True:
        taken.append(1)
        yield [len(taken) % 80 + 5, 6]


@pytest.mark.parametrize("ordered", [True, False])
def test_a_generator_is_read_one_window_at_a_time(model: Any, ordered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "WINDOW_PROMPTS", 10)
    taken: list[int] = []
    engine = TransformersEngine(model, batch_size=5)
    stream: Any = engine.capture(endless(taken), CaptureSpec(layers=[0]), ordered=ordered)

    assert taken == []
    first = next(stream)
    assert len(taken) == 10
    assert len(first) == (10 if ordered else 5)
    list(islice(stream, 2))
    assert len(taken) <= 30
    stream.close()


@pytest.mark.parametrize("ordered", [True, False])
def test_rows_that_the_caller_let_go_of_are_not_kept(
    model: Any, ordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "WINDOW_PROMPTS", 4)
    engine = TransformersEngine(model, batch_size=4)
    stream: Any = engine.capture(endless([]), CaptureSpec(), ordered=ordered)
    alive: list[weakref.ref[Any]] = []

    for _ in range(6):
        alive.append(weakref.ref(next(stream).acts[0]))
    gc.collect()

    assert sum(ref() is not None for ref in alive) == 0
    stream.close()


def test_rows_and_logits_that_wait_for_their_order_are_bounded(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[5 + i] * 10 for i in range(12)]  # 3840 bytes of rows each at three layers, 3880 of logits
    monkeypatch.setattr(windows, "ORDERED_BYTES", 12_000)
    engine = TransformersEngine(model)

    def sizes(**spec: Any) -> list[int]:
        return [len(part) for part in engine.capture(prompts, CaptureSpec(**spec))]

    assert sizes() == [3] * 4
    assert sizes(layers=(), logits="all") == [3] * 4
    assert sizes(logits="all") == [1] * 12
    assert sizes(pooling="mean") == sizes(layers=[0], logits="last", pooling="mean") == [12]
    assert sizes(layers=[0], logits="last", positions=":2") == [12]
    assert sizes(layers=(), logits="all", logit_top_k=2) == [12]


def test_a_list_is_checked_before_any_work_a_generator_when_it_comes_to_it(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "WINDOW_PROMPTS", 2)
    engine, faulty = TransformersEngine(model), [[5], [6], [7], []]

    with Counted(model) as passes:
        with pytest.raises(EmptyPrompt, match="prompt 3"):
            engine.capture(faulty, CaptureSpec())
        with pytest.raises(InvalidPrompt, match="prompt 0 is of type int"):
            engine.capture([5, 6, 7], CaptureSpec())  # type: ignore[list-item]
        with pytest.raises(InvalidInput, match="got one string"):
            engine.capture("hello", CaptureSpec())
        assert passes == []
        stream = engine.capture(iter(faulty), CaptureSpec())
        assert next(stream).index.tolist() == [0, 1]
        with pytest.raises(EmptyPrompt, match="prompt 3"):
            next(stream)


def test_no_prompt_gives_no_rows(model: Any) -> None:
    assert list(TransformersEngine(model).capture([], CaptureSpec())) == []


@pytest.mark.parametrize("layers", [[], (), np.array([], int), iter([])], ids=["list", "tuple", "array", "iterator"])
def test_a_spec_that_asks_for_nothing_is_refused(model: Any, layers: Any) -> None:
    with pytest.raises(InvalidInput, match="nothing was asked for"):
        TransformersEngine(model).capture([[5]], CaptureSpec(layers=layers))


def test_prompts_own_positions_are_rows_of_their_own(model: Any) -> None:
    prompts = [Prompt(token_ids=RAGGED[1], positions=[0, 39]), Prompt(token_ids=RAGGED[1], positions=[5])]

    (acts,) = TransformersEngine(model).capture(prompts, CaptureSpec(positions="last"))

    assert acts.positions.tolist() == [0, 39, 5]
    plain = plain_rows(model, RAGGED[1])
    assert worst_row_error(acts.acts[2], plain[2][[0, 39, 5]]) <= WORST


def test_the_head_reads_of_a_shared_prefix_only_what_is_asked_for(model: Any) -> None:
    engine = TransformersEngine(model)
    list(engine.capture(SHARED, CaptureSpec(layers=(), logits="last")))  # what is tried once is over
    rows: list[int] = []
    hook = model.get_output_embeddings().register_forward_hook(lambda _m, _i, output: rows.append(len(output)))

    list(engine.capture(SHARED, CaptureSpec(layers=(), logits="last")))
    hook.remove()

    assert sum(rows) == len(SHARED)


# Memory runs out


@pytest.fixture
def cramped() -> Callable[[int], Any]:
    """Make a model whose passes fail, as a full device does, above a number of tokens."""

    def make(limit: int) -> Any:
        model: Any = tiny_model("llama")
        plain = model.model.forward
        model.tried = []

        @functools.wraps(plain)  # its signature says that it takes a state
        def forward(*args: Any, **kwargs: Any) -> Any:
            tokens = kwargs["input_ids"].numel()
            model.tried.append(tokens)
            if tokens > limit:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
            return plain(*args, **kwargs)

        model.model.forward = forward
        return model

    return make


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("limit", [60, 100, 150])
def test_it_goes_on_in_smaller_batches(cramped: Any, model: Any, limit: int, ordered: bool) -> None:
    small = cramped(limit)
    engine = TransformersEngine(small)

    acts = in_asked_order(list(engine.capture(RAGGED, CaptureSpec(), ordered=ordered)))

    assert_plain(acts, RAGGED, model)
    assert engine.max_batch_tokens < sum(map(len, RAGGED))
    assert not any(module._forward_hooks for module in small.modules())
    small.tried.clear()
    list(engine.capture(RAGGED, CaptureSpec()))
    assert max(small.tried) <= limit  # what was learnt is kept


def test_one_prompt_alone_that_does_not_fit_is_named(cramped: Any) -> None:
    engine = TransformersEngine(cramped(50))

    with pytest.raises(EngineOutOfMemory, match=r"prompt 4 alone \(60 tokens\) does not fit .* cpu; shorten") as caught:
        list(engine.capture(RAGGED, CaptureSpec()))
    assert caught.value.retryable
    rest = [prompt for prompt in RAGGED if len(prompt) <= 50]
    assert len(in_asked_order(list(engine.capture(rest, CaptureSpec())))) == len(rest)


@pytest.mark.parametrize("limit", [60, 70, 100])
def test_tails_over_a_shared_prefix_are_halved_too(cramped: Any, model: Any, limit: int) -> None:
    prompts = [PREFIX + ids(n, 300 + n) for n in range(1, 20)]
    engine = TransformersEngine(cramped(limit))

    acts = in_asked_order(list(engine.capture(prompts, CaptureSpec(pooling="mean"))))

    assert max(map(len, prompts)) > 60
    for i in (0, 7, 18):
        plain = plain_rows(model, prompts[i])
        assert all(worst_row_error(acts.prompt(i)[k], plain[k].mean(0, keepdim=True)) <= WORST for k in plain)


def test_a_prefix_that_does_not_fit_is_not_shared(cramped: Any, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = TransformersEngine(cramped(10_000))
    list(engine.capture(SHARED, CaptureSpec()))

    tried: list[int] = []

    def full(*_args: Any) -> None:
        tried.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("streamtap.engines.transformers.run_prefix", full)

    assert_plain(in_asked_order(list(engine.capture(SHARED, CaptureSpec()))), SHARED, model)
    assert tried == [1]


def test_another_error_is_passed_on_as_it_is(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: Any, **_kwargs: Any) -> None:
        raise RuntimeError("a kernel of the device")

    monkeypatch.setattr(plain_blocks(model)[1], "forward", fail)

    with pytest.raises(RuntimeError, match="a kernel of the device"):
        list(TransformersEngine(model).capture(RAGGED, CaptureSpec()))


# Threads


def test_two_threads_capture_at_once_and_get_their_own_rows(model: Any) -> None:
    engine = TransformersEngine(model, batch_size=2)
    asks: list[tuple[list[list[int]], CaptureSpec]] = [
        (RAGGED, CaptureSpec(layers=[0])),
        (SHARED, CaptureSpec(perplexity=True)),
        (RAGGED[::-1], CaptureSpec(pooling="mean")),
        (SHARED[::-1], CaptureSpec(layers=[1], logits="last")),
    ]
    alone = [in_asked_order(list(engine.capture(prompts, spec))) for prompts, spec in asks]

    def run(ask: tuple[list[list[int]], CaptureSpec]) -> Activations:
        return in_asked_order(list(engine.capture(*ask)))

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(run, asks * 3, timeout=60))

    for acts, expected in zip(found, alone * 3, strict=True):
        assert acts.layers == expected.layers
        assert all(np.array_equal(acts.acts[k], expected.acts[k]) for k in acts.layers)
        for name in ("perplexity", "logits"):
            assert np.array_equal(getattr(acts, name), getattr(expected, name))
