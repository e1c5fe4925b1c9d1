"""The engine on vLLM, over a stand-in for the library: what it asks for, and which answers it does not believe.

A real vLLM runs in ``upstream/``.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from streamtap.activations import Activations, join
from streamtap.engines import vllm_offline, vllm_offline_rows
from streamtap.engines.opening import load_engine
from streamtap.engines.vllm_offline import VllmEngine
from streamtap.errors import (
    CaptureMissed,
    EngineDead,
    EngineFailed,
    InvalidInput,
    InvalidLayers,
    MissingExtra,
    PromptTooLong,
    StreamtapError,
    Unsupported,
)
from streamtap.spec import CaptureSpec
from streamtap.testing.stub_vllm import StubDead, StubVllm, installed, stub_described

FORMULA = StubVllm.formula
PROMPTS: list[tuple[int, ...]] = [(9, 8, 7), (5,), (9, 8, 7, 6, 5, 4), (11, 12)]
DEEP = {"layers": [0, 2]}


class Opened:
    """Opens the stand-in, and remembers what it opened."""

    def __init__(self) -> None:
        self.refuses: BaseException | None = None
        self.variables: dict[str, str] = {}
        self.all: list[StubVllm] = []

    def __call__(self, **options: Any) -> StubVllm:
        self.variables = dict(os.environ)
        if self.refuses is not None:
            raise self.refuses
        self.all.append(StubVllm(**options))
        return self.all[-1]

    @property
    def last(self) -> StubVllm:
        return self.all[-1]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    monkeypatch.setattr(vllm_offline, "described_model", lambda *_args, **_named: stub_described())
    opened = Opened()
    with installed(opened):
        yield opened


@pytest.fixture
def engine(opened: Opened) -> Iterator[VllmEngine]:
    engine = VllmEngine.load("/a/model")
    yield engine
    engine.close()


def captured(engine: VllmEngine, prompts: Sequence[Any] = PROMPTS, **spec: Any) -> Activations:
    return join(list(engine.capture(prompts, CaptureSpec(**spec))))


def assert_rows(acts: Activations, prompts: Sequence[Sequence[int]]) -> None:
    assert len(acts) == len(prompts)
    for place, ids in enumerate(prompts):
        for layer, rows in acts.prompt(place).items():
            np.testing.assert_array_equal(rows, FORMULA.rows(ids, layer))


def lengths(opened: Opened) -> list[list[int]]:
    return [[len(prompt) for prompt in call] for call in opened.last.calls]


def test_every_prompt_has_its_own_rows_in_order(engine: VllmEngine, opened: Opened) -> None:
    acts = captured(engine, **DEEP)

    assert_rows(acts, PROMPTS)
    assert acts.layers == (0, 2)
    assert [params.extra_args for params in opened.last.asked] == [{"output_residual_stream": [0, 2]}] * 4
    assert all(params.max_tokens == 1 for params in opened.last.asked)
    assert opened.last.left == set()


def test_equal_prompts_run_once(engine: VllmEngine, opened: Opened) -> None:
    assert_rows(captured(engine, [PROMPTS[0], PROMPTS[1], PROMPTS[0]], **DEEP), [PROMPTS[0], PROMPTS[1], PROMPTS[0]])

    assert lengths(opened) == [[3, 1]]


@pytest.mark.parametrize("pooling", ["last_token", "mean"])
def test_rows_are_pooled_here(engine: VllmEngine, pooling: str) -> None:
    acts = captured(engine, positions="-2:", pooling=pooling, layers=[1])

    for place, ids in enumerate(PROMPTS):
        rows = FORMULA.rows(ids, 1)[-2:]
        expected = rows[-1] if pooling == "last_token" else rows.mean(axis=0, dtype=np.float32)
        np.testing.assert_allclose(acts.acts[1][place], expected, rtol=1e-6)


def test_what_it_says_of_the_model(engine: VllmEngine) -> None:
    about = engine.provenance

    assert (about.model, about.commit, about.tokenizer) == ("/a/model", "sha256:1", stub_described().tokenizer_print)
    assert (about.engine, about.engine_version) == ("vllm", "0.30.0 with vllm-lens 1.3.0")
    assert (about.dtype, about.device, about.n_layers, about.hidden) == ("float32", "cpu", 3, 8)
    assert engine.tokenizer.context_length == 63


def test_costs_come_with_the_rows(engine: VllmEngine, opened: Opened) -> None:
    acts = captured(engine, layers=[1], token_nll=True, perplexity=True)

    assert_rows(acts, PROMPTS)
    for ids, costs in zip(PROMPTS, acts.token_nll or (), strict=True):
        np.testing.assert_array_equal(costs, FORMULA.losses(ids))
    assert len(opened.last.calls) == 1


def test_costs_come_without_rows(engine: VllmEngine, opened: Opened) -> None:
    acts = captured(engine, layers=(), perplexity=True)

    np.testing.assert_allclose(acts.perplexity, [FORMULA.perplexity(ids) for ids in PROMPTS], rtol=1e-6)
    assert [params.extra_args for params in opened.last.asked] == [None] * 4


def test_no_call_holds_more_than_vllm_has_room_for(opened: Opened) -> None:
    """Four blocks of four tokens and one that is nobody's; a prompt takes those of its tokens and of one more."""
    engine = VllmEngine.load("/a/model", engine_options={"num_gpu_blocks_override": 5})

    assert_rows(captured(engine, **DEEP), PROMPTS)

    assert lengths(opened) == [[3, 1, 6], [2]]


@pytest.mark.parametrize(
    ("name", "most", "calls"),
    [("MOST_SEQUENCES", 2, [[3, 1], [6, 2]]), ("MOST_BYTES", 4 * 2 * FORMULA.hidden * 4, [[3, 1], [6], [2]])],
)
def test_calls_are_bounded_in_sequences_and_bytes(
    engine: VllmEngine, opened: Opened, monkeypatch: pytest.MonkeyPatch, name: str, most: int, calls: list[list[int]]
) -> None:
    monkeypatch.setattr(vllm_offline_rows, name, most)

    assert_rows(captured(engine, **DEEP), PROMPTS)

    assert lengths(opened) == calls


def _stream(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], Any]:
    def spoil(output: Any) -> Any:
        output.activations["residual_stream"] = change(output.activations["residual_stream"])
        return output

    return spoil


def _without_any(output: Any) -> Any:
    del output.activations
    return output


SPOILED: dict[str, Callable[[Any], Any]] = {
    "a row less": _stream(lambda stream: stream[:, :-1]),
    "a row more": _stream(lambda stream: torch.cat([stream, stream[:, :1]], dim=1)),
    "a layer less": _stream(lambda stream: stream[:1]),
    "narrower": _stream(lambda stream: stream[..., :-1]),
    "not finite": _stream(lambda stream: stream / 0),
    "zeros": _stream(lambda stream: stream * 0),
    "none": _without_any,
}


@pytest.mark.parametrize("kind", SPOILED)
def test_an_answer_that_is_not_whole_is_refused(engine: VllmEngine, opened: Opened, kind: str) -> None:
    opened.last.spoil = SPOILED[kind]

    with pytest.raises(CaptureMissed, match="prompt"):
        captured(engine, **DEEP)


def test_costs_that_are_not_whole_are_refused(engine: VllmEngine, opened: Opened) -> None:
    def spoil(output: Any) -> Any:
        output.prompt_logprobs = output.prompt_logprobs[:-1]
        return output

    opened.last.spoil = spoil

    with pytest.raises(CaptureMissed, match=r"log-likelihoods of 2 tokens of prompt 0; expected 3"):
        captured(engine, perplexity=True, **DEEP)


def test_answers_to_other_prompts_are_refused(engine: VllmEngine, opened: Opened) -> None:
    def spoil(output: Any) -> Any:
        output.prompt_token_ids = [1]
        return output

    opened.last.spoil = spoil

    with pytest.raises(EngineFailed, match="4 answers are not those of the 4 prompts"):
        captured(engine, **DEEP)


@pytest.mark.parametrize(
    ("raised", "expected"),
    [(ValueError("a b"), EngineFailed), (RuntimeError("a b"), EngineFailed), (Exception("a b"), EngineFailed)],
)
def test_what_vllm_raises_is_one_of_ours_and_leaves_nothing_behind(
    engine: VllmEngine, opened: Opened, raised: Exception, expected: type[StreamtapError]
) -> None:
    opened.last.fails = raised

    with pytest.raises(expected) as caught:
        captured(engine, **DEEP)

    assert "a b" not in str(caught.value)
    assert opened.last.left == set()
    opened.last.fails = None
    assert_rows(captured(engine, PROMPTS[:2], **DEEP), PROMPTS[:2])


def test_a_key_press_passes_and_leaves_nothing_behind(engine: VllmEngine, opened: Opened) -> None:
    pressed = threading.Event()

    def press() -> None:
        if not pressed.is_set():
            os.kill(os.getpid(), signal.SIGINT)
            pressed.set()

    opened.last.before_step = press
    with pytest.raises(KeyboardInterrupt):
        captured(engine, **DEEP)

    assert opened.last.left == set()
    assert not opened.last.llm_engine.has_unfinished_requests()
    assert_rows(captured(engine, PROMPTS[:2], **DEEP), PROMPTS[:2])


def test_processes_that_are_gone_are_called_so(engine: VllmEngine, opened: Opened) -> None:
    opened.last.fails = StubDead("gone")

    with pytest.raises(EngineDead):
        captured(engine, **DEEP)


def test_processes_that_were_killed_keep_nobody_waiting(engine: VllmEngine, opened: Opened) -> None:
    """Where they are killed in the middle of a step, vLLM never comes back from it."""
    reached, for_ever = threading.Event(), threading.Event()

    def hang() -> None:
        reached.set()
        for_ever.wait()

    opened.last.before_step = hang
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(captured, engine, **DEEP)
        assert reached.wait(10)
        opened.last.llm_engine.engine_core.resources.engine_dead = True
        with pytest.raises(EngineDead):
            waiting.result(timeout=10)

    with pytest.raises(EngineDead):
        captured(engine, **DEEP)
    for_ever.set()


@pytest.mark.parametrize("spec", [{"logits": "last"}, {"exact": True}])
def test_what_vllm_lacks_is_refused_before_any_work(engine: VllmEngine, opened: Opened, spec: dict[str, Any]) -> None:
    with pytest.raises(Unsupported, match="backend='local'"):
        engine.capture(PROMPTS, CaptureSpec(**spec))

    assert opened.last.calls == []


def test_layers_and_prompts_that_cannot_be_are_refused_before_any_work(engine: VllmEngine, opened: Opened) -> None:
    with pytest.raises(InvalidLayers):
        engine.capture(PROMPTS, CaptureSpec(layers=[3]))
    with pytest.raises(PromptTooLong, match="room for 63, which is .* one less where the engine draws a token"):
        captured(engine, [(5,) * 64], **DEEP)

    assert opened.last.calls == []
    assert_rows(captured(engine, [(5,) * 63], **DEEP), [(5,) * 63])


def test_its_options_are_those_under_which_rows_are_whole(opened: Opened) -> None:
    load_engine(
        "/a/model",
        backend="vllm",
        dtype="bfloat16",
        max_model_len=32,
        tensor_parallel_size=2,
        distributed_executor="mp",
        gpu_memory_utilization=0.5,
        engine_options={"seed": 7},
    ).close()

    assert opened.last.options == {
        **{"model": "/a/model", "dtype": "bfloat16", "max_model_len": 32, "tensor_parallel_size": 2},
        **{"pipeline_parallel_size": 1, "distributed_executor_backend": "mp", "gpu_memory_utilization": 0.5},
        **{"enable_prefix_caching": False, "max_logprobs": -1, "use_tqdm_on_load": False, "seed": 7},
    }
    assert opened.variables["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert opened.variables["VLLM_NO_USAGE_STATS"] == "1"
    assert "VLLM_USE_V2_MODEL_RUNNER" not in os.environ
    assert opened.last.closed == 1


def test_the_checkpoints_own_dtype_is_the_default(engine: VllmEngine, opened: Opened) -> None:
    assert opened.last.options["dtype"] == "float32"
    assert "revision" not in opened.last.options


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"dtype": "float64"}, InvalidInput),
        ({"tensor_parallel_size": 0}, InvalidInput),
        ({"max_model_len": True}, InvalidInput),
        ({"engine_options": {"dtype": "float32"}}, InvalidInput),
        ({"engine_options": {"enable_prefix_caching": True}}, Unsupported),
        ({"engine_options": {"speculative_config": {"method": "ngram"}}}, Unsupported),
        ({"engine_options": {"spec_method": "ngram"}}, Unsupported),
        ({"engine_options": {"kv_offloading_size": 4.0}}, Unsupported),
        ({"pipeline_parallel_size": 2}, Unsupported),
    ],
)
def test_options_that_cannot_be_are_refused_before_a_model_is_opened(
    opened: Opened, options: dict[str, Any], expected: type[StreamtapError]
) -> None:
    with pytest.raises(expected):
        VllmEngine.load("/a/model", **options)

    assert opened.all == []


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (TypeError("no such option"), InvalidInput),
        (ValueError("too long"), InvalidInput),
        (RuntimeError("no room"), EngineFailed),
    ],
)
def test_a_model_that_does_not_open_says_why(opened: Opened, raised: Exception, expected: type[StreamtapError]) -> None:
    opened.refuses = raised

    with pytest.raises(expected, match=str(raised)):
        VllmEngine.load("/a/model")


def test_vllm_without_its_plugin_is_refused(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(StubVllm, "register_hooks")

    with pytest.raises(InvalidInput, match="VLLM_LENS_DISABLE"):
        VllmEngine.load("/a/model")

    assert opened.last.closed == 1


@pytest.mark.parametrize("missing", ["vllm", "vllm_lens"])
def test_a_library_that_is_missing_is_named_with_the_command(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)

    with pytest.raises(MissingExtra, match=r"pip install 'streamtap\[vllm\]'"):
        VllmEngine.load("/a/model")


def test_a_closed_engine_says_so_and_closes_once(engine: VllmEngine, opened: Opened) -> None:
    engine.close()
    engine.close()

    assert opened.last.closed == 1
    with pytest.raises(InvalidInput, match="closed"):
        captured(engine, **DEEP)
