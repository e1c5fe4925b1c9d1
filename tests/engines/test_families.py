"""Every family's capture against the plain model: alone, in batches, with shared prefixes, cut short."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from streamtap.activations import Activations, in_asked_order
from streamtap.engines.transformers import TransformersEngine
from streamtap.pooling import POOLINGS, pool
from streamtap.spec import CaptureSpec
from streamtap.testing.models import FAMILIES, RECURRENT, tiny_model
from streamtap.testing.recipes import WINDOW_TOKENS
from streamtap.testing.reference import (
    comparable_rows,
    finish,
    plain_blocks,
    plain_logits,
    plain_rows,
    routing_margins,
    worst_row_error,
)

ALONE, BATCHED, FLOAT64 = 1e-5, 5e-5, 1e-9
#: Router logits of a tiny model err by about 1e-4 in float32; a gap of ten times that is safe.
ROUTING_MARGIN = 1e-3
Ids = list[int]


def _ids(n: int, seed: int) -> Ids:
    # Ids from 90 up stand for images in the multimodal families.
    return np.random.default_rng(seed).integers(3, 90, n).tolist()  # type: ignore[no-any-return]


LONG = _ids(70, 1)
PAIR = [_ids(3, 2), LONG]
RAGGED = [_ids(n, 10 + n) for n in (1, 47, 2, 31, 7, 13, 70, 30)]
PREFIX = _ids(48, 3)
# The prefix is a prompt itself, so that what is shared leaves it one token; the longest tail outgrows a window.
SHARED = [PREFIX + _ids(n, 20 + n) for n in (5, 1, 20, 9, 17, 2)] + [PREFIX, _ids(9, 4)]

assert max(map(len, RAGGED)) > WINDOW_TOKENS


@lru_cache(maxsize=4)
def model_of(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return tiny_model(family, dtype=dtype)


@lru_cache(maxsize=512)
def _reference(family: str, dtype: torch.dtype, ids: tuple[int, ...]) -> tuple[dict[int, Any], dict[int, Any]]:
    model = model_of(family, dtype)
    return plain_rows(model, ids), routing_margins(model, ids)


def capture(
    model: PreTrainedModel, prompts: Sequence[Ids], engine: dict[str, Any] | None = None, **spec: Any
) -> Activations:
    runner = TransformersEngine(model, **(engine or {}))
    return in_asked_order(list(runner.capture(prompts, CaptureSpec(**spec))))


@contextmanager
def positions_run(model: PreTrainedModel) -> Iterator[list[int]]:
    """Positions that the first block ran in each pass, padding counted."""
    run: list[int] = []
    hook = plain_blocks(model)[0].register_forward_hook(lambda _m, inputs, _o: run.append(inputs[0][..., 0].numel()))
    try:
        yield run
    finally:
        hook.remove()


def assert_rows(
    acts: Activations, family: str, prompts: Sequence[Ids], worst: float, dtype: torch.dtype = torch.float32
) -> None:
    """Every layer of every prompt is within ``worst`` of the plain model, on rows whose routing is equal."""
    compared, whole = 0, 0
    for i, ids in enumerate(prompts):
        rows, margins = _reference(family, dtype, tuple(ids))
        for layer, got in acts.prompt(i).items():
            kept = comparable_rows(margins, layer, len(ids), ROUTING_MARGIN)
            assert got.shape == (len(ids), 32)
            error = worst_row_error(got[kept.numpy()], rows[layer][kept])
            assert error <= worst, f"{family}, prompt {i} of {len(ids)} tokens, layer {layer}: {error:.2e}"
            compared, whole = compared + int(kept.sum()), whole + len(ids)
    assert compared >= 0.75 * whole


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_alone_is_the_plain_model(family: str) -> None:
    acts = capture(model_of(family), [LONG])

    assert acts.layers == (0, 1, 2)
    assert acts.acts[0].dtype == np.float32
    assert acts.token_ids.tolist() == LONG
    assert acts.positions.tolist() == list(range(70))
    assert_rows(acts, family, [LONG], ALONE)


@pytest.mark.parametrize("family", FAMILIES)
def test_exact_runs_each_prompt_as_if_alone(family: str) -> None:
    prompts = [*RAGGED[:3], *SHARED[-3:]]
    acts = capture(model_of(family), prompts, exact=True)

    assert_rows(acts, family, prompts, ALONE)
    for i in (0, 4):
        alone = capture(model_of(family), [prompts[i]], exact=True)
        assert all(np.array_equal(acts.prompt(i)[k], alone.acts[k]) for k in alone.layers)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_ragged_batch_is_the_plain_model(family: str) -> None:
    assert_rows(capture(model_of(family), RAGGED), family, RAGGED, BATCHED)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_short_prompt_is_unmoved_by_a_long_one(family: str) -> None:
    assert_rows(capture(model_of(family), PAIR, {"batch_size": 2}), family, PAIR, BATCHED)


@pytest.mark.parametrize("family", FAMILIES)
def test_shared_prefixes_are_the_plain_model_and_run_once(family: str) -> None:
    engine = TransformersEngine(model_of(family))
    acts = in_asked_order(list(engine.capture(SHARED, CaptureSpec())))
    with positions_run(model_of(family)) as run:  # what is tried once for a model is over
        again = in_asked_order(list(engine.capture(SHARED, CaptureSpec())))

    assert_rows(acts, family, SHARED, BATCHED)
    assert all(np.array_equal(acts.acts[k], again.acts[k]) for k in acts.layers)
    whole = sum(map(len, SHARED))
    if family in RECURRENT:
        assert sum(run) >= whole
    else:
        assert sum(run) <= 0.6 * whole


@pytest.mark.parametrize("family", FAMILIES)
def test_prefixes_are_left_whole_when_asked(family: str) -> None:
    acts = capture(model_of(family), SHARED, {"share_prefixes": False})

    assert_rows(acts, family, SHARED, BATCHED)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_that_stops_early_has_the_same_rows(family: str) -> None:
    prompts = [*PAIR, *SHARED]
    whole = capture(model_of(family), prompts)

    for layer in (0, 1):
        acts = capture(model_of(family), prompts, layers=[layer])
        assert acts.layers == (layer,)
        assert np.array_equal(acts.acts[layer], whole.acts[layer])


@pytest.fixture
def float64_throughout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Families round norms, softmaxes and routers to float32 even in a float64 model; keep them from it."""
    cast, softmax = torch.Tensor.to, torch.nn.functional.softmax

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        narrows = self.dtype == torch.float64 and torch.float32 in (*args, *kwargs.values())
        return self if narrows else cast(self, *args, **kwargs)

    def wide_softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return softmax(x, dim=dim, dtype=None if x.dtype == torch.float64 else dtype)

    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(torch.Tensor, "float", lambda self: to(self, torch.float32))
    monkeypatch.setattr(torch.nn.functional, "softmax", wide_softmax)


@pytest.mark.usefixtures("float64_throughout")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("prompts", [RAGGED, [*PAIR, *SHARED]], ids=["ragged", "shared"])
def test_float64_shows_that_only_rounding_is_left(family: str, prompts: list[Ids]) -> None:
    acts = capture(model_of(family, torch.float64), prompts)

    assert acts.acts[0].dtype == np.float64
    assert_rows(acts, family, prompts, FLOAT64, torch.float64)


@pytest.mark.parametrize("family", FAMILIES)
def test_small_batches_in_a_long_stream_keep_the_callers_order(family: str) -> None:
    prompts = [*RAGGED, *SHARED, *RAGGED[::-1]]

    acts = capture(model_of(family), prompts, {"batch_size": 5, "max_batch_tokens": 200})

    assert acts.index.tolist() == list(range(len(prompts)))
    assert_rows(acts, family, prompts, BATCHED)


def _everything_that_a_capture_could_change(model: PreTrainedModel) -> dict[str, Any]:
    hooks = [
        name
        for name, module in model.named_modules()
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
    ]
    return {
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "buffers": {name: value.clone() for name, value in model.named_buffers()},
        "config": model.config.to_dict(),
        "modes": [module.training for module in model.modules()],
        "gradients": [weight.requires_grad for weight in model.parameters()],
        "hooks": hooks,
        "own_forwards": [name for name, module in model.named_modules() if "forward" in vars(module)],
        "logits": plain_logits(model, LONG),
    }


def _assert_unchanged(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert after["hooks"] == before["hooks"] == []
    assert torch.equal(after["logits"], before["logits"])
    for kind in ("config", "modes", "gradients", "own_forwards"):
        assert after[kind] == before[kind]
    for kind in ("state", "buffers"):
        assert before[kind].keys() == after[kind].keys()
        assert all(torch.equal(value, after[kind][name]) for name, value in before[kind].items())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_is_bit_equal_after_a_capture(family: str) -> None:
    model = tiny_model(family)
    before = _everything_that_a_capture_could_change(model)

    capture(model, SHARED, pooling="mean", perplexity=True, logits="last")
    capture(model, RAGGED, layers=[1])

    _assert_unchanged(before, _everything_that_a_capture_could_change(model))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_is_bit_equal_after_a_capture_that_failed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(family)
    before = _everything_that_a_capture_could_change(model)

    def fail(*_args: Any, **_kwargs: Any) -> None:
        raise RuntimeError("the middle of the pass")

    with monkeypatch.context() as patched:
        # Not setattr, which some releases of pytest undo by leaving the class's own method in the instance.
        patched.setitem(vars(plain_blocks(model)[1]), "forward", fail)
        with pytest.raises(RuntimeError, match="the middle of the pass"):
            capture(model, SHARED)

    _assert_unchanged(before, _everything_that_a_capture_could_change(model))
    assert_rows(capture(model, [LONG]), family, [LONG], ALONE)


def test_a_capture_left_in_the_middle_leaves_no_hook() -> None:
    model = tiny_model("llama")
    before = _everything_that_a_capture_could_change(model)
    stream: Any = TransformersEngine(model, batch_size=1).capture(RAGGED, CaptureSpec())

    next(stream)
    _assert_unchanged(before, _everything_that_a_capture_could_change(model))
    stream.close()

    _assert_unchanged(before, _everything_that_a_capture_could_change(model))


def test_closing_an_engine_leaves_the_callers_model_alone() -> None:
    model = tiny_model("llama")
    before = _everything_that_a_capture_could_change(model)

    TransformersEngine(model).close()

    _assert_unchanged(before, _everything_that_a_capture_could_change(model))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_row_through_norm_and_head_is_the_next_token(family: str) -> None:
    model = model_of(family)
    acts = capture(model, [LONG], layers="last")

    logits = finish(model, torch.from_numpy(acts.acts[2]))

    assert worst_row_error(logits.numpy(), plain_logits(model, LONG)) <= ALONE


CHOSEN: dict[str, tuple[Any, Callable[[NDArray[Any]], NDArray[Any]]]] = {
    "last": ("last", lambda every: every[-1:]),
    "the last five": ("-5:", lambda every: every[-5:]),
    "the first three": (":3", lambda every: every[:3]),
    "all but the ends": ("1:-1", lambda every: every[1:-1]),
    "one": (-2, lambda every: every[-2:-1]),
    "in the prefix alone": ([0, 2], lambda every: every[[0, 2]]),
    "explicit": ([0, 1, -1], lambda every: every[[0, 1, -1]]),
    "explicit and backwards": ([-1, 1, 0], lambda every: np.sort(every[[-1, 1, 0]])),
    "a mask": (lambda ids: ids % 2 == ids[-1] % 2, lambda every: every),
}


@pytest.mark.parametrize(("positions", "expected"), CHOSEN.values(), ids=CHOSEN.keys())
@pytest.mark.parametrize("pooling", ["none", "mean", "first_token", "last_token"])
@pytest.mark.parametrize("family", ["gpt2", "gemma3"])
def test_chosen_positions_are_those_of_the_whole_capture(
    family: str, pooling: str, positions: Any, expected: Callable[[NDArray[Any]], NDArray[Any]]
) -> None:
    model, prompts = model_of(family), [*SHARED, *PAIR]
    raw = capture(model, prompts)

    acts = capture(model, prompts, positions=positions, pooling=pooling)

    chosen, rows = [], []
    for i, ids in enumerate(prompts):
        kept = np.arange(len(ids))
        kept = kept[positions(np.array(ids))] if callable(positions) else expected(kept)
        chosen.append(kept)
        rows.append(raw.prompt(i)[2][kept])
    offsets = np.concatenate([[0], np.cumsum([len(kept) for kept in chosen])])
    pooled = torch.from_numpy(pool(np.concatenate(rows), offsets, pooling))
    assert worst_row_error(acts.acts[2], pooled) <= BATCHED
    if pooling == "none":
        assert acts.offsets.tolist() == offsets.tolist()
        assert acts.positions.tolist() == np.concatenate(chosen).tolist()
        flat = [ids[p] for ids, kept in zip(prompts, chosen, strict=True) for p in kept]
        assert acts.token_ids.tolist() == flat


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mixtral", "opt_post_norm", "mamba"])
@pytest.mark.parametrize("prompts", [RAGGED, SHARED], ids=["ragged", "shared"])
def test_pooled_is_the_pool_of_raw(family: str, prompts: list[Ids]) -> None:
    raw = capture(model_of(family), prompts)

    for pooling in POOLINGS:
        pooled = capture(model_of(family), prompts, pooling=pooling)
        assert pooled.pooling == pooling
        for layer in raw.layers:
            expected = torch.from_numpy(pool(raw.acts[layer], raw.offsets, pooling))
            assert worst_row_error(pooled.acts[layer], expected) <= (1e-6 if pooling == "mean" else 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_perplexity_is_that_of_the_whole_softmax(family: str) -> None:
    model, prompts = model_of(family, torch.float64), [*PAIR, *SHARED]
    acts = capture(model, prompts, layers=(), perplexity=True, token_nll=True)

    assert acts.perplexity is not None
    assert acts.token_nll is not None
    assert acts.acts == {}
    for i, ids in enumerate(prompts):
        log_probabilities = plain_logits(model, ids).log_softmax(dim=-1)[:-1]
        nll = -log_probabilities.gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1).numpy()
        np.testing.assert_allclose(acts.token_nll[i], nll, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(acts.perplexity[i], np.exp([nll.mean(), nll.min(), nll.max()]), rtol=1e-4)


def test_a_prompt_of_one_token_has_no_perplexity() -> None:
    acts = capture(model_of("llama"), RAGGED, layers=[0], perplexity=True, token_nll=True)

    assert acts.perplexity is not None
    assert acts.token_nll is not None
    assert [len(nll) for nll in acts.token_nll] == [len(ids) - 1 for ids in RAGGED]
    assert np.isnan(acts.perplexity).all(axis=1).tolist() == [len(ids) == 1 for ids in RAGGED]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_models_own(family: str) -> None:
    model, prompts = model_of(family), [*PAIR, *SHARED]
    last = capture(model, prompts, layers=(), logits="last")
    every = capture(model, prompts, layers=[0], logits="all")

    assert last.logits is not None
    assert every.logits is not None
    assert every.logit_offsets is not None
    assert last.logits.shape == (len(prompts), 97)
    for i, ids in enumerate(prompts):
        own = plain_logits(model, ids)
        kept = comparable_rows(routing_margins(model, ids), 2, len(ids), ROUTING_MARGIN)
        start, stop = every.logit_offsets[i : i + 2]
        assert stop - start == len(ids)
        assert worst_row_error(every.logits[start:stop][kept.numpy()], own[kept]) <= BATCHED
        assert worst_row_error(last.logits[i : i + 1][kept[-1:].numpy()], own[-1:][kept[-1:]]) <= BATCHED


@pytest.mark.parametrize("family", FAMILIES)
def test_the_largest_logits_come_with_their_ids(family: str) -> None:
    model = model_of(family)
    acts = capture(model, [LONG], logits="all", logit_top_k=5)

    assert acts.logits is not None
    assert acts.logit_ids is not None
    own = plain_logits(model, LONG)
    assert worst_row_error(acts.logits, own.topk(5).values) <= ALONE
    picked = own.gather(1, torch.from_numpy(acts.logit_ids).long())
    assert worst_row_error(acts.logits, picked) <= ALONE
