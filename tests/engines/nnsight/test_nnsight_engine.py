"""Local nnsight: every family, blocks of any form, early exit, batches, and what is refused."""

from __future__ import annotations

from typing import Any

import nnsight
import numpy as np
import pytest
import torch
from torch import nn

from streamtap.activations import Activations, join
from streamtap.capture.runs import TokenRun
from streamtap.engines.base import AcrossNetwork, Completes, Engine
from streamtap.engines.by_sequence import Wanted
from streamtap.engines.nnsight import engine as engine_module
from streamtap.engines.nnsight.engine import NnsightEngine
from streamtap.engines.nnsight.in_trace import run_trace
from streamtap.engines.nnsight.traces import Sizes, plan_trace, read_trace
from streamtap.errors import EngineOutOfMemory, InvalidInput, Unsupported, UnsupportedModel
from streamtap.spec import CaptureSpec
from streamtap.testing.models import FAMILIES, MIXTURES, tiny_model
from streamtap.testing.reference import (
    comparable_rows,
    plain_blocks,
    plain_logits,
    plain_rows,
    routing_margins,
    worst_row_error,
)
from streamtap.testing.tokenizers import tiny_tokenizer

# What nnsight deprecates is not used.
pytestmark = pytest.mark.filterwarnings("error::FutureWarning")

WORST = 5e-5
RAGGED = [np.random.default_rng(n).integers(3, 90, n).tolist() for n in (3, 40, 1, 17, 8)]


def capture(engine: NnsightEngine, prompts: list[Any], **spec: Any) -> Activations:
    return join(list(engine.capture(prompts, CaptureSpec(**spec))))


class Passes:
    """Shapes of what enters a block, of every pass, while it stands in a ``with``."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block

    def __enter__(self) -> list[tuple[int, ...]]:
        self.shapes: list[tuple[int, ...]] = []
        self.hook = self.block.register_forward_hook(lambda _m, x, _o: self.shapes.append(tuple(x[0].shape[:2])))
        return self.shapes

    def __exit__(self, *_: object) -> None:
        self.hook.remove()


def test_it_is_an_engine_that_does_not_write(model: Any) -> None:
    engine = NnsightEngine(model, tiny_tokenizer(), name="tiny")

    assert isinstance(engine, Engine)
    assert isinstance(engine, AcrossNetwork)
    assert not isinstance(engine, Completes)
    about = engine.provenance
    assert (about.engine, about.engine_version) == ("nnsight", nnsight.__version__)
    assert (about.model, about.n_layers, about.hidden, about.dtype) == ("tiny", 3, 32, "float32")


@pytest.mark.parametrize("family", FAMILIES)
def test_v07_rows_are_those_of_the_model_whatever_its_blocks_return(family: str) -> None:
    model = tiny_model(family)
    engine = NnsightEngine(model)

    acts = capture(engine, RAGGED[:2])

    for i, prompt in enumerate(RAGGED[:2]):
        plain = plain_rows(model, prompt)
        margins = routing_margins(model, prompt) if family in MIXTURES else {}
        for layer, rows in acts.prompt(i).items():
            same = comparable_rows(margins, layer, len(prompt), 1e-3).numpy()
            assert same.any()
            assert worst_row_error(rows[same], plain[layer][torch.from_numpy(same)]) <= WORST


class Block(nn.Module):
    """Adds its number, and returns that as ``form`` says."""

    def __init__(self, number: int, form: str) -> None:
        super().__init__()
        self.number, self.form = number, form
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, stream: torch.Tensor) -> Any:
        out = stream + self.number + self.weight
        return {"tensor": out, "tuple": (out,), "cache": (out, object()), "list": [out]}[self.form]


class Stub(nn.Module):
    """Two blocks over the token ids as a stream."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(number, form) for number in (1, 10))
        self.rest = nn.Identity()

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> torch.Tensor:
        assert not use_cache
        stream = input_ids[:, :, None].float().expand(-1, -1, 4)
        for block in self.blocks:
            out = block(stream)
            stream = out if isinstance(out, torch.Tensor) else out[0]
        return self.rest(stream)


@pytest.mark.parametrize("form", ["tensor", "tuple", "cache", "list"])
def test_v07_a_batch_of_two_comes_back_as_two(form: str) -> None:
    tree = nnsight.NNsight(Stub(form))
    runs = [
        TokenRun(np.array(ids, np.int32), np.arange(len(ids), dtype=np.int32), i)
        for i, ids in enumerate([[5, 6], [7, 8, 9]])
    ]
    wanted, sizes = Wanted((0, 1), "none"), Sizes(4, "float32", None)

    with torch.no_grad():
        packed = run_trace(tree, list(tree.blocks), torch.float32, None, **plan_trace(runs, wanted, sizes).arguments())

    first, second = read_trace(packed.numpy(), runs, wanted, sizes)
    assert first.rows is not None
    assert second.rows is not None
    assert first.rows[:, :, 0].tolist() == [[6, 7], [16, 17]]
    assert second.rows[:, :, 3].tolist() == [[8, 9, 10], [18, 19, 20]]


def test_the_pass_ends_behind_the_last_layer_where_no_head_is_asked(model: Any) -> None:
    engine = NnsightEngine(model)
    last = plain_blocks(model)[2]

    with Passes(last) as passes:
        capture(engine, RAGGED, layers=[0, 1])
        assert passes == []
        capture(engine, RAGGED, layers=[0], perplexity=True)
        assert passes


def test_the_limits_of_a_trace_hold(model: Any) -> None:
    first = plain_blocks(model)[0]
    for options, spec, most in (
        ({"batch_size": 2}, {}, lambda shape: shape[0] <= 2),
        ({"max_batch_tokens": 48}, {}, lambda shape: shape[0] * shape[1] <= 48),
        ({}, {"exact": True}, lambda shape: shape[0] == 1),
    ):
        with Passes(first) as passes:
            capture(NnsightEngine(model, **options), RAGGED, **spec)  # type: ignore[arg-type]
        assert sum(shape[0] for shape in passes) == len(RAGGED)
        assert all(most(shape) for shape in passes)


def test_what_comes_back_at_once_is_bounded(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = NnsightEngine(model)
    engine._limits = type(engine._limits)(None, 512, result_bytes=3 * 32 * 4 * 20)

    with Passes(plain_blocks(model)[0]) as passes:
        acts = capture(engine, RAGGED)

    assert max(prompts for prompts, _ in passes) < len(RAGGED)
    for i, prompt in enumerate(RAGGED):
        assert worst_row_error(acts.prompt(i)[2], plain_rows(model, prompt)[2]) <= WORST


@pytest.mark.parametrize("limit", ["batch_size", "max_batch_tokens"])
def test_a_limit_below_one_is_refused_by_name(model: Any, limit: str) -> None:
    with pytest.raises(InvalidInput, match=f"{limit} must be at least 1; got 0"):
        NnsightEngine(model, **{limit: 0})  # type: ignore[arg-type]


def test_rows_come_in_the_models_dtype_and_without_a_graph() -> None:
    model = tiny_model("llama", dtype=torch.bfloat16)
    for weight in model.parameters():
        weight.requires_grad_(True)

    acts = capture(NnsightEngine(model), RAGGED[:2], pooling="mean")

    raw = plain_rows(model, RAGGED[1])[1].float().detach()
    mean = raw.mean(dim=0).bfloat16().float().numpy()
    assert acts.acts[1].dtype.name == "bfloat16"
    assert np.array_equal(acts.acts[1][1].astype(np.float32), mean) or np.allclose(
        acts.acts[1][1].astype(np.float32), mean, rtol=1e-2
    )


def test_logits_are_the_models_own_softcap_and_all() -> None:
    model = tiny_model("gemma2")
    engine = NnsightEngine(model)

    whole = capture(engine, RAGGED[:2], layers=(), logits="all", token_nll=True)

    right = torch.cat([plain_logits(model, prompt) for prompt in RAGGED[:2]]).float()
    assert np.allclose(whole.logits, right.numpy(), atol=1e-4)
    assert whole.token_nll is not None
    costs = torch.nn.functional.cross_entropy(right[:2], torch.tensor(RAGGED[0][1:]), reduction="none")
    assert np.allclose(whole.token_nll[0], costs.numpy(), atol=1e-4)


def test_the_head_is_looked_at_in_slices(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from streamtap.engines.nnsight import traces

    asked: dict[str, Any] = {"layers": [1], "logits": "all", "logit_top_k": 3, "token_nll": True}
    whole = capture(NnsightEngine(model), RAGGED, **asked)
    monkeypatch.setattr(traces, "_SLICE_VALUES", 2 * 97)

    sliced = capture(NnsightEngine(model), RAGGED, **asked)

    assert np.array_equal(sliced.logit_ids, whole.logit_ids)
    assert np.allclose(sliced.logits, whole.logits, atol=1e-5)
    for one, other in zip(sliced.token_nll or (), whole.token_nll or (), strict=True):
        assert np.allclose(one, other, atol=1e-5)


def test_a_prompt_of_one_token_predicts_nothing(model: Any) -> None:
    acts = capture(NnsightEngine(model), [[5]], layers=(), perplexity=True, token_nll=True)

    assert [len(each) for each in acts.token_nll or ()] == [0]
    assert np.isnan(acts.perplexity).all()


def test_a_model_without_a_head_gives_rows_and_refuses_scores() -> None:
    model: Any = tiny_model("llama")
    plain = plain_rows(model, RAGGED[0])
    model.set_output_embeddings(None)
    engine = NnsightEngine(model)

    assert worst_row_error(capture(engine, [RAGGED[0]]).acts[2], plain[2]) <= WORST
    with pytest.raises(Unsupported, match="has no language-model head"):
        engine.capture([RAGGED[0]], CaptureSpec(perplexity=True))


def test_blocks_that_are_not_found_are_told() -> None:
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        NnsightEngine(tiny_model("t5"))


def test_the_callers_tokenizer_and_model_are_left_as_they_were(model: Any) -> None:
    tokenizer = tiny_tokenizer(padding_side="right")
    tokenizer.pad_token = None
    before = {name: value.clone() for name, value in model.state_dict().items()}

    engine = NnsightEngine(model, tokenizer)
    capture(engine, ["a text"], perplexity=True)
    engine.close()

    assert (tokenizer.padding_side, tokenizer.pad_token) == ("right", None)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert worst_row_error(plain_rows(model, RAGGED[0])[2].numpy(), plain_rows(model, RAGGED[0])[2]) == 0


def test_models_that_follow_the_longest_run_one_by_one() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = tiny_model("llama", rope_parameters=rope)

    with Passes(plain_blocks(model)[0]) as passes:
        capture(NnsightEngine(model), RAGGED)

    assert [prompts for prompts, _ in passes] == [1] * len(RAGGED)


def test_it_goes_on_in_smaller_traces_where_memory_runs_out(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def tight(*arguments: Any, **named: Any) -> Any:
        asked.append(named["token_ids"].numel())
        if asked[-1] > 45:
            raise torch.OutOfMemoryError("no more")
        return run_trace(*arguments, **named)

    monkeypatch.setattr(engine_module, "run_trace", tight)
    engine = NnsightEngine(model)

    acts = capture(engine, RAGGED)

    assert asked[0] > 45
    assert all(worst_row_error(acts.prompt(i)[0], plain_rows(model, ids)[0]) <= WORST for i, ids in enumerate(RAGGED))
    with pytest.raises(EngineOutOfMemory, match=r"prompt 0 alone \(60 tokens\) does not fit"):
        capture(engine, [list(range(3, 63))])


def test_a_closed_engine_says_so_and_its_weights_tell_it(model: Any) -> None:
    engine = NnsightEngine(model)
    assert engine.weights_hash().startswith("sha256:")

    engine.close()
    engine.close()

    for call in (lambda: engine.capture([[5]], CaptureSpec()), engine.weights_hash):
        with pytest.raises(InvalidInput, match="closed"):
            call()
