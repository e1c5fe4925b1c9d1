"""vLLM with vllm-lens without either: as much of both as ``VllmEngine`` asks for, with rows made by a formula.

``installed()`` puts it where an import finds it. Attributes of ``StubVllm`` say what goes wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from streamtap.engines.described import DescribedModel
from streamtap.engines.references import ModelReference
from streamtap.engines.tokenizing import PromptTokenizer
from streamtap.testing.characters import VOCABULARY
from streamtap.testing.fake_engine import FakeEngine
from streamtap.testing.tokenizers import tiny_tokenizer

#: What every drawn token is, what it says, and the token that is likelier at every place.
DRAWN, TEXT, RIVAL = 13, "(", 96
BLOCK_TOKENS = 4
_CONTEXT = 64


class StubDead(Exception):
    """The library's processes are gone; as there, it has no class in common with its other errors."""


@dataclass
class StubParams:
    """``SamplingParams``, as far as anyone looks at it; ``more`` is the rest."""

    max_tokens: int
    extra_args: dict[str, Any] | None = None
    prompt_logprobs: int | None = None
    logprobs: int | None = None
    output_kind: str = "final"
    more: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, **values: Any) -> StubParams:
        """From the arguments of the library's own."""
        own = {name: values.pop(name) for name in list(values) if name in cls.__dataclass_fields__}
        return cls(**own, more=values)


class StubVllm:
    """``vllm.LLM`` with what vllm-lens makes of it.

    ``formula`` gives the rows. ``spoil`` changes each answer on its way out, ``fails`` is raised by a step, ``refuses``
    instead of adding the second request. ``calls`` are the prompts of each call, ``asked`` their parameters, ``left``
    the requests whose rows are still with the workers.
    """

    formula = FakeEngine(n_layers=3, hidden=8)

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.spoil: Callable[[Any], Any] = lambda output: output
        self.fails: BaseException | None = None
        self.refuses: BaseException | None = None
        self.before_step: Callable[[], None] = lambda: None
        self.calls: list[list[list[int]]] = []
        self.asked: list[StubParams] = []
        self.left: set[str] = set()
        self.steps, self.closed = 0, 0
        self._numbers = iter(range(1 << 20))
        self.llm_engine: Any = _StubCore(self)

    def register_hooks(self) -> None:
        """By this vllm-lens is known."""

    def generate(self, prompts: Sequence[Any], params: Sequence[StubParams], *, use_tqdm: bool) -> list[Any]:
        """Run all that was added, whoever added it."""
        self.calls.append([list(prompt["prompt_token_ids"]) for prompt in prompts])
        self.asked += params
        for prompt, own in zip(prompts, params, strict=True):
            if self.refuses is not None and self.llm_engine.has_unfinished_requests():
                raise self.refuses
            self.llm_engine.add_request(str(next(self._numbers)), prompt, own)
        outputs = []
        while self.llm_engine.has_unfinished_requests():
            outputs += [output for output in self.llm_engine.step() if output.finished]
        self.left -= {_own(output.request_id) for output in outputs}
        return [self.spoil(output) for output in sorted(outputs, key=lambda output: int(output.request_id))]

    def collective_rpc(self, method: str, args: tuple[str, ...]) -> None:
        """Only dropping the rows of a request."""
        assert method == "clear_captured_states"
        self.left = {own for own in self.left if not own.startswith(f"{args[0]}-")}


class _StubCore:
    """The engine inside ``LLM``: a token a step for everyone that runs."""

    def __init__(self, llm: StubVllm) -> None:
        self._llm = llm
        self._open: dict[str, tuple[list[int], StubParams, int]] = {}
        self.vllm_config = _config(llm.options)
        self.engine_core = SimpleNamespace(shutdown=self._shut_down, resources=SimpleNamespace(engine_dead=False))

    def add_request(self, request_id: str, prompt: Any, params: StubParams) -> str:
        self._open[_own(request_id)] = (list(prompt["prompt_token_ids"]), params, 0)
        return _own(request_id)

    def abort_request(self, ids: Sequence[str], internal: bool = False) -> None:
        assert internal
        for each in ids:
            self._open.pop(each, None)

    def has_unfinished_requests(self) -> bool:
        return bool(self._open)

    def step(self) -> list[Any]:
        self._llm.before_step()
        self._llm.steps += 1
        self._llm.left |= set(self._open)
        if self._llm.fails is not None:
            raise self._llm.fails
        outputs = []
        for own, (ids, params, before) in list(self._open.items()):
            drawn = before + 1
            self._open[own] = (ids, params, drawn)
            finished = drawn == params.max_tokens
            if finished:
                del self._open[own]
            if finished or params.output_kind == "cumulative":
                outputs.append(_output(own.split("-")[0], ids, params, drawn, finished, self._llm.formula))
        return outputs

    def _shut_down(self, timeout: float) -> None:
        self._llm.closed += 1


def _own(request_id: str) -> str:
    return f"{request_id}-own"


def _output(
    request_id: str, ids: list[int], params: StubParams, drawn: int, finished: bool, formula: FakeEngine
) -> Any:
    every = [*ids, *([DRAWN] * drawn)]
    told = SimpleNamespace(
        token_ids=every[len(ids) :],
        text=TEXT * drawn,
        finish_reason="length" if finished else None,
        stop_reason=None,
        logprobs=None if params.logprobs is None else [_told(DRAWN, -1.5)] * drawn,
    )
    output = SimpleNamespace(
        request_id=request_id, prompt_token_ids=ids, finished=finished, outputs=[told], prompt_logprobs=None
    )
    layers = (params.extra_args or {}).get("output_residual_stream")
    if layers and finished:
        rows = np.stack([formula.rows(every[:-1], layer) for layer in layers])
        output.activations = {"residual_stream": torch.from_numpy(rows)}
    if params.prompt_logprobs is not None:
        costs = zip(ids[1:], formula.losses(ids).tolist(), strict=True)
        output.prompt_logprobs = [None, *(_told(token, -cost) for token, cost in costs)]
    return output


def _told(token: int, logprob: float) -> dict[int, Any]:
    return {token: SimpleNamespace(logprob=logprob, rank=2), RIVAL: SimpleNamespace(logprob=-0.25, rank=1)}


def _config(options: dict[str, Any]) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(
            dtype=getattr(torch, options["dtype"]),
            max_model_len=options.get("max_model_len", _CONTEXT),
            quantization=None,
            max_logprobs=options["max_logprobs"],
        ),
        device_config=SimpleNamespace(device_type="cpu"),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=options.get("max_num_batched_tokens", 32)),
        cache_config=SimpleNamespace(
            num_gpu_blocks=options.get("num_gpu_blocks_override", 100), block_size=BLOCK_TOKENS
        ),
    )


def stub_described() -> DescribedModel:
    """What is known of the model that ``StubVllm`` stands for, whatever it is called."""
    folder = Path("/a/model")
    return DescribedModel(
        ModelReference(str(folder), folder, None, "sha256:1"),
        PromptTokenizer(tiny_tokenizer(), context_length=_CONTEXT, vocabulary=VOCABULARY),
        StubVllm.formula.n_layers,
        StubVllm.formula.hidden,
        StubVllm.formula.dtype,
    )


@contextmanager
def installed(opened: Callable[..., Any] = StubVllm) -> Iterator[None]:
    """Inside the ``with``, ``import vllm`` finds this; ``vllm.LLM(…)`` is what ``opened`` gives."""
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"LLM": opened, "SamplingParams": StubParams.of, "__version__": "0.30.0"},
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: True)},
        "vllm.sampling_params": {"RequestOutputKind": SimpleNamespace(CUMULATIVE="cumulative")},
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.exceptions": {"EngineDeadError": StubDead},
        "vllm_lens": {"__version__": "1.3.0"},
    }
    before = {name: sys.modules.get(name) for name in contents}
    for name, values in contents.items():
        module = sys.modules[name] = ModuleType(name)
        vars(module).update(values)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = old
