"""Faults of models that are not as others are: arguments dropped, outputs in tuples, hooks that never fire."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from streamtap.activations import Activations, in_asked_order
from streamtap.engines.transformers import TransformersEngine
from streamtap.errors import CaptureMissed
from streamtap.spec import CaptureSpec
from streamtap.testing.models import tiny_model
from streamtap.testing.reference import plain_rows, worst_row_error

SHORT, LONG = [5, 6, 7], [(7 * i) % 80 + 4 for i in range(60)]
SHARED = [LONG[:48] + tail for tail in ([9], [10, 11, 12], [13] * 7, [14, 15, 16, 17], [18] * 12)]
TEXTS = ["No.", "The residual stream is what every block reads and adds to."]


def capture(model: Any, prompts: Sequence[Any], tokenizer: Any = None, **spec: Any) -> Activations:
    engine = TransformersEngine(model, tokenizer, name="tiny")
    return in_asked_order(list(engine.capture(prompts, CaptureSpec(**spec))))


# V05: output_hidden_states accepted, then ignored


class Swallowing(nn.Module):
    """A wrapper as remote code has them: whatever it does not know, it drops."""

    def __init__(self, inner: LlamaForCausalLM) -> None:
        super().__init__()
        self.inner, self.config = inner, inner.config

    def get_input_embeddings(self) -> nn.Module:
        embeddings: nn.Module = self.inner.get_input_embeddings()
        return embeddings

    def forward(self, input_ids: torch.Tensor, **_kwargs: Any) -> Any:
        return SimpleNamespace(logits=self.inner(input_ids).logits, hidden_states=None)


class SwallowingStates(Swallowing):
    """One that takes a key-value state in its signature, and drops it all the same."""

    def forward(self, input_ids: torch.Tensor, past_key_values: Any = None, **_kwargs: Any) -> Any:
        return super().forward(input_ids)


@pytest.mark.parametrize("wrapper", [Swallowing, SwallowingStates])
def test_v05_a_model_that_drops_its_arguments_is_captured_all_the_same(wrapper: type[Swallowing]) -> None:
    inner: Any = tiny_model("llama")
    model = wrapper(inner).eval()
    assert model(torch.tensor([SHORT]), output_hidden_states=True).hidden_states is None

    acts = capture(model, [*SHARED, SHORT])

    for i, ids in enumerate([*SHARED, SHORT]):
        plain = plain_rows(inner, ids)
        assert all(worst_row_error(acts.prompt(i)[layer], plain[layer]) <= 5e-5 for layer in (0, 1, 2))


# V07: a tensor in one release, a tuple in another


class Block(nn.Module):
    """A causal block of running means; ``shape`` says how it hands its output on."""

    def __init__(self, shape: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.mix, self.mlp, self.shape = nn.Linear(8, 8), nn.Linear(8, 8), shape

    def forward(self, x: torch.Tensor, before: tuple[Any, int] = (0.0, 0)) -> Any:
        total, count = before
        counts = count + torch.arange(1, x.shape[1] + 1)[None, :, None]
        x = x + self.mix((total + x.cumsum(1)) / counts)
        return self.shape(x + torch.tanh(self.mlp(x)))


class HomeMade(nn.Module):
    """A model with its own loop over blocks; ``call`` runs one, and ``after`` may spoil what comes out."""

    def __init__(self, shape: Callable[[torch.Tensor], Any] = lambda x: x) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = LlamaConfig(vocab_size=97, hidden_size=8, num_hidden_layers=3, num_attention_heads=2)
        self.embed = nn.Embedding(97, 8)
        self.stages = nn.ModuleList(Block(shape) for _ in range(3))

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def call(self, block: nn.Module, x: torch.Tensor) -> Any:
        return block(x)

    def forward(self, input_ids: torch.Tensor, **_kwargs: Any) -> Any:
        x = self.embed(input_ids)
        for stage in self.stages:
            output = self.call(stage, x)
            x = output if isinstance(output, torch.Tensor) else output[0]
        return (x,)


SHAPES: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda x: x,
    "tuple of one": lambda x: (x,),
    "tuple with cache": lambda x: (x, (x.new_zeros(2, 4), x.new_zeros(2, 4))),
    "list": lambda x: [x, None],
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_v07_tensors_and_tuples_give_every_sequence_of_the_batch(shape: Callable[[torch.Tensor], Any]) -> None:
    model = HomeMade(shape).eval()
    prompts = [[3, 4, 5, 6], [7, 8, 9, 10]]
    expected: list[torch.Tensor] = []
    with torch.no_grad():
        x = model.embed(torch.tensor(prompts))
        for stage in model.stages:
            output = stage(x)
            x = output if isinstance(output, torch.Tensor) else output[0]
            expected.append(x)

    acts = capture(model, prompts)

    assert acts.offsets.tolist() == [0, 4, 8]
    for layer in range(3):
        np.testing.assert_allclose(acts.acts[layer].reshape(2, 4, 8), expected[layer], rtol=1e-5, atol=1e-6)


STRANGE_SHAPES: dict[str, Callable[[torch.Tensor], Any]] = {
    "dict": lambda x: {"hidden": x},
    "none first": lambda x: (None, x),
    "one sequence": lambda x: x[0],
}


@pytest.mark.parametrize("shape", STRANGE_SHAPES.values(), ids=STRANGE_SHAPES.keys())
def test_v07_an_output_of_another_kind_is_refused(shape: Callable[[torch.Tensor], Any]) -> None:
    model = HomeMade().eval()
    model.stages[1].register_forward_hook(lambda _m, _i, output: shape(output))

    with pytest.raises(CaptureMissed, match=r"block 1 .*\[batch, positions, hidden\]") as caught:
        capture(model, [SHORT, LONG])
    assert caught.value.layer == 1


# V13: hooks that never fire


class Bypassing(HomeMade):
    """Calls ``forward`` itself, as compiled graphs do: no hook is ever called."""

    def call(self, block: nn.Module, x: torch.Tensor) -> Any:
        return block.forward(x)


class Skipping(HomeMade):
    """Leaves one block out."""

    def call(self, block: nn.Module, x: torch.Tensor) -> Any:
        return x if block is self.stages[1] else block(x)


class Looping(HomeMade):
    """Runs each block twice, so that one number names two outputs."""

    def call(self, block: nn.Module, x: torch.Tensor) -> Any:
        return block(block(x))


@pytest.mark.parametrize(
    ("model_class", "layer", "fired"),
    [(Bypassing, 0, "fired 0 of 1 times"), (Skipping, 1, "fired 0 of 1 times"), (Looping, 0, "fired twice|2 of 1")],
)
def test_v13_a_block_that_does_not_fire_once_is_refused(model_class: type[HomeMade], layer: int, fired: str) -> None:
    model = model_class().eval()

    with pytest.raises(CaptureMissed, match=fired) as caught:
        capture(model, [SHORT, LONG])

    assert caught.value.layer == layer
    assert not any(module._forward_hooks for module in model.modules())


# A shared prefix is only reused where the model takes its state up again, in every block and for any tail


class LateMixing(HomeMade):
    """Takes a key-value state and drops it; its first blocks, which do not mix positions, cannot show it."""

    def __init__(self) -> None:
        super().__init__()
        for stage in list(self.stages)[:2]:
            nn.init.zeros_(stage.get_submodule("mix").weight)  # type: ignore[arg-type]

    def forward(self, input_ids: torch.Tensor, past_key_values: Any = None, **_kwargs: Any) -> Any:
        return super().forward(input_ids)


class OneTokenState(HomeMade):
    """Takes its state up again for one token, and forgets it for several, as recurrent models have done."""

    def forward(self, input_ids: torch.Tensor, past_key_values: Any = None, **_kwargs: Any) -> Any:
        sums: dict[int, Any] = getattr(past_key_values, "sums", {})
        if past_key_values is not None:
            past_key_values.sums = sums
        x = self.embed(input_ids)
        for k, stage in enumerate(self.stages):
            before = sums.get(k, (0.0, 0)) if x.shape[1] == 1 else (0.0, 0)
            sums[k] = (x.sum(1, keepdim=True), x.shape[1])
            x = stage(x, before)
        return (x,)


@pytest.mark.parametrize("model_class", [LateMixing, OneTokenState])
def test_a_state_that_is_not_taken_up_everywhere_is_not_shared(model_class: type[HomeMade]) -> None:
    prompts = [LONG[:49], *SHARED]
    engine = TransformersEngine(model_class().eval(), name="tiny")
    list(engine.capture(prompts, CaptureSpec(layers=[0])))

    acts = in_asked_order(list(engine.capture(prompts, CaptureSpec())))

    whole = TransformersEngine(model_class().eval(), name="tiny", share_prefixes=False)
    expected = in_asked_order(list(whole.capture(prompts, CaptureSpec())))
    for layer in range(3):
        np.testing.assert_allclose(acts.acts[layer], expected.acts[layer], rtol=1e-4, atol=1e-5)
