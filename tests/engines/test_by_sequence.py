"""What engines share that give one sequence at a time: any order in, the caller's out, all of it whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from streamtap.activations import Activations, Provenance, join
from streamtap.capture.runs import TokenRun
from streamtap.engines import by_sequence, windows
from streamtap.engines.by_sequence import BySequence, Made, SequenceRows, Wanted, chosen_rows, pooled_rows
from streamtap.engines.tokenizing import PromptTokenizer
from streamtap.errors import CaptureMissed, InvalidInput, InvalidLayers, InvalidPrompt
from streamtap.pooling import POOLINGS, pool
from streamtap.spec import CaptureSpec, Projection, Prompt
from streamtap.testing.fake_engine import FakeEngine

FAKE = FakeEngine(n_layers=3, hidden=8)
VOCABULARY = FAKE.logits([1]).shape[1]
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12], [5, 6, 7]]
HEAD = {"perplexity": True, "token_nll": True, "logits": "all"}


class Maker:
    """Makes rows as ``FakeEngine`` does, the longest sequence first; ``spoil`` is what goes wrong with them."""

    def __init__(self, spoil: Any = None) -> None:
        self.spoil = spoil or (lambda _place, made: [made])
        self.asked: list[tuple[list[list[int]], Wanted]] = []
        self.closed = 0

    def __call__(self, runs: Sequence[TokenRun], wanted: Wanted) -> Iterator[Made]:
        self.asked.append(([run.token_ids.tolist() for run in runs], wanted))
        try:
            for place in sorted(range(len(runs)), key=lambda place: -len(runs[place].token_ids)):
                for made in self.spoil(place, made_of(runs[place], wanted)):
                    yield made if isinstance(made, tuple) else (place, made)
        finally:
            self.closed += 1


def made_of(run: TokenRun, wanted: Wanted) -> SequenceRows:
    ids, rows = run.token_ids, None
    if wanted.layers:
        rows = chosen_rows(np.stack([FAKE.rows(ids, layer) for layer in wanted.layers]), run, wanted.pooling)
    logits = top = None
    if wanted.logits:
        logits = FAKE.logits(ids) if wanted.logits == "all" else FAKE.logits(ids)[-1:]
        if wanted.top_k:
            top = np.argsort(-logits, axis=1, kind="stable")[:, : wanted.top_k].astype(np.int32)
            logits = np.take_along_axis(logits, top, axis=1)
    return SequenceRows(rows, FAKE.losses(ids) if wanted.nll else None, logits, top)


def engine(make: Any, **provenance: Any) -> BySequence:
    tokenizer = PromptTokenizer(FAKE.tokenizer.tokenizer, context_length=64, vocabulary=VOCABULARY)
    return BySequence(replace(FAKE.provenance, **provenance), tokenizer, make)


def capture(make: Any, prompts: Any = PROMPTS, *, ordered: bool = True, **spec: Any) -> Activations:
    return join(list(engine(make).capture(prompts, CaptureSpec(**spec), ordered=ordered)))


def assert_same(found: Activations, expected: Activations) -> None:
    assert found.layers == expected.layers
    for name in ("offsets", "token_ids", "positions", "index", "perplexity", "logits", "logit_ids", "logit_offsets"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)
    for layer, rows in expected.acts.items():
        assert found.acts[layer].dtype == rows.dtype
        np.testing.assert_allclose(found.acts[layer].astype(float), rows.astype(float), atol=1e-6)
    assert (found.token_nll is None) == (expected.token_nll is None)
    for mine, theirs in zip(found.token_nll or (), expected.token_nll or (), strict=True):
        np.testing.assert_array_equal(mine, theirs)


DIRECTIONS = Projection.onto(np.arange(1, 17).reshape(2, 8) % 5 - 1.5)
SPECS: dict[str, dict[str, Any]] = {
    "all": {},
    "one layer": {"layers": -1},
    **{pooling: {"pooling": pooling, "positions": "-2:"} for pooling in POOLINGS},
    "positions": {"positions": ":2", "layers": [0, 2]},
    "head": HEAD,
    "head and no rows": {**HEAD, "layers": ()},
    "head of some positions": {**HEAD, "positions": "last"},
    "last logits": {"logits": "last"},
    "top logits": {"logits": "last", "logit_top_k": 3},
    "more logits than there are": {"logits": "last", "logit_top_k": 10 * VOCABULARY},
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
    "products": {"projection": DIRECTIONS},
    "products of means": {"projection": DIRECTIONS, "pooling": "mean"},
    "exact": {"exact": True, "positions": ":1"},
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize("ordered", [True, False])
def test_what_comes_is_what_any_engine_gives(spec: dict[str, Any], ordered: bool) -> None:
    if spec.get("exact"):  # the fake engine shows by other rows that it ran exactly, which this maker does not
        expected = join(list(FAKE.capture(PROMPTS, CaptureSpec(positions=":1"))))
    else:
        expected = join(list(FAKE.capture(PROMPTS, CaptureSpec(**spec))))

    found = capture(Maker(), ordered=ordered, **spec)

    if not ordered:
        assert found.index.tolist() in ([2, 0, 3, 1], [0, 3, 2, 1])  # as they were made, the longest run first
        found = found.select(np.argsort(found.index))
    assert found.pooling == spec.get("pooling", "none")
    assert_same(found, expected)


def test_equal_sequences_are_made_once_and_cut_behind_their_last_row() -> None:
    make = Maker()
    capture(make, positions=":2", layers=[2])

    ((runs, wanted),) = make.asked
    assert runs == [[5, 6], [8], [9, 10]]
    assert wanted == Wanted((2,), "none")


def test_the_whole_sequence_runs_where_the_head_is_asked() -> None:
    make = Maker()
    capture(make, positions=":1", layers=0, perplexity=True, logits="last", logit_top_k=2)

    ((runs, wanted),) = make.asked
    assert runs == [[5, 6, 7], [8], [9, 10, 11, 12]]
    assert wanted == Wanted((0,), "none", nll=True, logits="last", top_k=2)


def test_positions_of_a_prompt_are_its_own() -> None:
    prompts = [Prompt(token_ids=[5, 6, 7], positions=[0, 2]), Prompt(token_ids=[5, 6, 7], positions=[1])]

    found = capture(Maker(), prompts, layers=1)

    np.testing.assert_array_equal(found.acts[1], FAKE.rows([5, 6, 7], 1)[[0, 2, 1]])
    assert found.positions.tolist() == [0, 2, 1]


def test_rows_are_handed_out_a_few_sequences_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_sequence, "_PART_SEQUENCES", 2)
    spec = CaptureSpec(layers=0)

    parts = list(engine(Maker()).capture([[5], [6, 7], [5], [8, 9, 10]], spec, ordered=False))
    assert [part.index.tolist() for part in parts] == [[3, 1], [0, 2]]

    monkeypatch.setattr(by_sequence, "_PART_BYTES", 3 * 8 * 4)
    parts = list(engine(Maker()).capture([[5], [6, 7], [8, 9, 10]], spec, ordered=False))
    assert [part.index.tolist() for part in parts] == [[2], [1, 0]]


def test_windows_are_made_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "WINDOW_PROMPTS", 2)
    make = Maker()

    stream = engine(make).capture(iter(PROMPTS), CaptureSpec(layers=0), ordered=True)
    assert make.asked == []
    assert next(stream).index.tolist() == [0, 1]
    assert len(make.asked) == 1
    assert next(stream).index.tolist() == [2, 3]


def test_rows_in_float32_are_rounded_to_the_models_dtype() -> None:
    (found,) = engine(Maker(), dtype="bfloat16").capture(PROMPTS, CaptureSpec(layers=0, pooling="mean"), ordered=True)

    assert found.acts[0].dtype == ml_dtypes.bfloat16
    wide = pool(FAKE.rows([9, 10, 11, 12], 0), np.array([0, 4]), "mean")
    np.testing.assert_array_equal(found.acts[0][2], wide[0].astype(ml_dtypes.bfloat16))

    (wider,) = engine(Maker(), dtype="bfloat16").capture(PROMPTS, CaptureSpec(layers=0, dtype="float32"), ordered=True)
    assert wider.acts[0].dtype == np.float32
    np.testing.assert_array_equal(wider.acts[0][3], FAKE.rows([8], 0)[0].astype(ml_dtypes.bfloat16).astype(np.float32))


@pytest.mark.parametrize("pooling", POOLINGS)
def test_chosen_rows_are_picked_and_pooled(pooling: str) -> None:
    values = np.random.default_rng(0).standard_normal((2, 5, 8)).astype(np.float32)
    for chosen in ([0, 1, 2, 3, 4], [1, 3]):
        run = TokenRun(np.arange(5, dtype=np.int32), np.array(chosen, np.int32), 0)

        found = chosen_rows(values, run, pooling)

        right = [pool(layer[chosen], np.array([0, len(chosen)]), pooling) for layer in values]
        np.testing.assert_allclose(found, np.stack(right), rtol=1e-6)
        np.testing.assert_allclose(pooled_rows(values[:, chosen], pooling), np.stack(right), rtol=1e-6)


def without(name: str) -> Any:
    return lambda _place, made: [replace(made, **{name: None})]


def changed(name: str, change: Any) -> Any:
    return lambda _place, made: [replace(made, **{name: change(getattr(made, name).copy())})]


def with_nan(values: Any) -> Any:
    values[(-1,) * values.ndim] = np.nan
    return values


def dead(values: Any) -> Any:
    values[1] = 0
    return values


SPOILT: dict[str, tuple[Any, str, int]] = {
    "nothing": (lambda place, made: [made] if place else [], r"gave nothing for prompt 0, one of 1", 0),
    "twice": (lambda _place, made: [made, made], "gave a sequence twice", 0),
    "another": (lambda _place, made: [(7, made)], "or one that was not asked for", 0),
    "no rows": (without("rows"), r"rows of shape none for prompt 2; expected \[3, 4, 8\]", 0),
    "short": (changed("rows", lambda rows: rows[:, :-1]), r"rows of shape \[3, 3, 8\] for prompt 2", 0),
    "a layer lacks": (changed("rows", lambda rows: rows[1:]), r"rows of shape \[2, 4, 8\]", 0),
    "narrow": (changed("rows", lambda rows: rows[..., 1:]), r"rows of shape \[3, 4, 7\]", 0),
    "not finite": (changed("rows", with_nan), "block 2 put out a value that is not finite for prompt 2", 2),
    "dead": (changed("rows", dead), "block 1 put out only zeros for prompt 2", 1),
    "dtype": (changed("rows", lambda rows: rows.astype(np.float16)), "block 0 came in float16 .* expected float32", 0),
    "no losses": (without("nll"), r"log-likelihoods of shape none for prompt 2; expected \[3\]", 0),
    "losses": (changed("nll", lambda nll: np.append(nll, nll[:1])), r"log-likelihoods of shape \[4\]", 0),
    "bad losses": (changed("nll", with_nan), "log-likelihoods of prompt 2 hold a value that is not finite", 0),
    "no logits": (without("logits"), r"logits of shape none for prompt 2; expected \[4, 1\]", 0),
    "logits": (changed("logits", lambda logits: logits[:1]), r"logits of shape \[1, 3\]", 0),
    "flat logits": (changed("logits", lambda logits: logits[:, 0]), r"logits of shape \[4\]", 0),
    "more logits": (changed("logits", lambda logits: np.repeat(logits, 2, 1)), r"logits of shape \[4, 6\]", 0),
    "bad logits": (changed("logits", with_nan), "logits of prompt 2 hold a value", 0),
    "no ids": (without("logit_ids"), r"ids of logits of shape none for prompt 2; expected \[4, 3\]", 0),
}


@pytest.mark.parametrize(("spoil", "said", "layer"), SPOILT.values(), ids=SPOILT.keys())
@pytest.mark.parametrize("ordered", [True, False])
def test_what_is_not_whole_is_refused(spoil: Any, said: str, layer: int, ordered: bool) -> None:
    make = Maker(spoil)

    with pytest.raises(CaptureMissed, match=said) as caught:
        capture(make, ordered=ordered, **HEAD, logit_top_k=3)

    assert caught.value.layer == layer
    assert make.closed == 1


def test_a_fault_of_the_head_alone_concerns_the_last_block() -> None:
    with pytest.raises(CaptureMissed, match="log-likelihoods") as caught:
        capture(Maker(without("nll")), layers=(), token_nll=True)

    assert caught.value.layer == 2


@pytest.mark.parametrize("pooling", ["none", "last_token", "first_token", "mean"])
def test_zeros_are_a_dead_layer_unless_the_token_stands_alone(pooling: str) -> None:
    """A padding token's embedding may be zero, and then so is its row where it is the first."""
    zeros = Maker(changed("rows", np.zeros_like))
    if pooling != "first_token":
        with pytest.raises(CaptureMissed, match="block 0 put out only zeros for prompt 0"):
            capture(zeros, [[0, 5]], pooling=pooling)

    assert not capture(zeros, [[0]], pooling=pooling).acts[0].any()
    assert not capture(zeros, [[0, 5]], pooling="first_token").acts[0].any()


def test_bad_input_runs_nothing() -> None:
    make = Maker()
    bad: list[tuple[type[Exception], Any, dict[str, Any]]] = [
        (InvalidLayers, PROMPTS, {"layers": 3}),
        (InvalidInput, PROMPTS, {"layers": ()}),
        (InvalidInput, PROMPTS, {"projection": Projection.onto(np.ones((1, 7)))}),
        (InvalidInput, "one text", {}),
        (InvalidPrompt, [*PROMPTS, 5], {}),
    ]
    for kind, prompts, spec in bad:
        with pytest.raises(kind):  # at the call, before anything is taken
            engine(make).capture(prompts, CaptureSpec(**spec), ordered=True)
    with pytest.raises(InvalidPrompt, match="prompt 4 holds token id"):
        capture(make, [*PROMPTS, [VOCABULARY]])

    assert make.asked == []


def test_no_prompts_give_nothing() -> None:
    assert list(engine(Maker()).capture([], CaptureSpec(), ordered=True)) == []


def test_a_capture_that_is_left_closes_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_sequence, "_PART_SEQUENCES", 1)
    make = Maker()
    parts = engine(make).capture(PROMPTS, CaptureSpec(layers=0), ordered=False)

    assert next(parts).index.tolist() == [2]
    assert make.closed == 0
    parts.close()  # type: ignore[attr-defined]
    assert make.closed == 1


def test_an_error_closes_what_runs_while_somebody_still_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine may hold its device until its generator ends, and the traceback keeps that alive."""
    make = Maker(changed("rows", with_nan))

    with pytest.raises(CaptureMissed) as held:
        capture(make)

    assert make.closed == 1
    assert held.value.layer == 2


def test_what_the_engine_raises_comes_through() -> None:
    def failing(runs: Sequence[TokenRun], wanted: Wanted) -> Iterator[Made]:
        yield 0, made_of(runs[0], wanted)
        raise CaptureMissed("the engine is gone", layer=1)

    with pytest.raises(CaptureMissed, match="the engine is gone"):
        capture(failing)


@pytest.mark.parametrize("held", [0, 1, 2])
def test_what_was_made_before_an_error_comes_first(held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller who keeps each part has it, whatever happens to the rest."""
    monkeypatch.setattr(by_sequence, "_PART_SEQUENCES", 2)

    def failing(runs: Sequence[TokenRun], wanted: Wanted) -> Iterator[Made]:
        for place in range(2 + held):
            yield place, made_of(runs[place], wanted)
        raise CaptureMissed("the engine is gone", layer=1)

    parts = engine(failing).capture([[5 + i] for i in range(9)], CaptureSpec(layers=0), ordered=False)
    found = [next(parts).index.tolist() for _ in range(1 + (held > 0))]

    assert found == [[0, 1], [2, 3][:held]][: len(found)]
    with pytest.raises(CaptureMissed, match="the engine is gone"):
        next(parts)


def test_a_maker_may_give_a_list() -> None:
    def listed(runs: Sequence[TokenRun], wanted: Wanted) -> Iterable[Made]:
        return [(place, made_of(run, wanted)) for place, run in enumerate(runs)]

    assert_same(capture(listed), join(list(FAKE.capture(PROMPTS, CaptureSpec()))))


def test_provenance_goes_with_the_rows() -> None:
    about = Provenance("far", "c", "t", "float32", engine="api", n_layers=3, hidden=8)
    made_there = BySequence(about, PromptTokenizer(None, vocabulary=VOCABULARY), Maker())

    (found,) = made_there.capture(PROMPTS, CaptureSpec(layers=0), ordered=True)

    assert found.provenance is about
