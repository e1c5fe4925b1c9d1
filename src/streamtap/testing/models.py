"""Tiny real models of many families, built from a config with large random weights.

Large ones (standard deviation 0.5) on purpose: with the small weights of a fresh model,
a fault in positions, masks or padding hides below any tolerance.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from streamtap.errors import InvalidInput
from streamtap.testing.recipes import RECIPES, Size

#: Not decoder-only: an engine must refuse them.
ENCODER_DECODERS: tuple[str, ...] = ("t5",)
#: Blocks that choose experts by token: rounding can flip a choice, which is no fault of a capture.
MIXTURES: tuple[str, ...] = ("mixtral", "qwen3_moe", "afmoe")
#: A state that runs on from token to token, which transformers does not take up again for several tokens.
RECURRENT: tuple[str, ...] = ("mamba",)
#: Every family that an engine must capture.
FAMILIES: tuple[str, ...] = tuple(name for name in RECIPES if name not in ENCODER_DECODERS)


def tiny_model(
    family: str,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    n_layers: int = 3,
    hidden: int = 32,
    std: float | None = None,
    **config: Any,
) -> PreTrainedModel:
    """A model of ``family`` with random weights, in eval mode on the CPU.

    Matrices, embeddings and biases are drawn around 0, norm weights around 1; every value is
    drawn in float64 and rounded once, so two dtypes of one seed are the same model.

    Args:
        family: One of ``FAMILIES`` or ``ENCODER_DECODERS``.
        dtype: Weights' dtype.
        seed: Of the weights.
        n_layers: Decoder blocks.
        hidden: Width of the residual stream; a multiple of 8.
        std: Standard deviation of the weights; None takes the family's, 0.5 for all but Mamba.
        **config: Fields of the family's config to set instead of the recipe's.

    Raises:
        InvalidInput: no such family.
    """
    if family not in RECIPES:
        raise InvalidInput(f"family must be one of {', '.join(RECIPES)}; got {family!r}.")
    recipe = RECIPES[family]
    fields = {**recipe.fields(Size(n_layers, hidden)), **config}
    config_class, model_class = getattr(transformers, recipe.config), getattr(transformers, recipe.model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)  # for what the class itself draws and we keep
        model = model_class(config_class(**fields))
    _draw_weights(model, seed, recipe.std if std is None else std)
    if dtype == torch.float64 and family in MIXTURES:
        model.set_experts_implementation("eager")  # the grouped kernel takes no float64
    built: PreTrainedModel = model.to(dtype).eval()
    return built


@torch.no_grad()
def _draw_weights(model: torch.nn.Module, seed: int, std: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if name.endswith(("A_log", "dt_proj.bias")):
            continue  # Mamba's time constants: outside their range the recurrence runs off to infinity
        drawn = torch.randn(weight.shape, generator=generator, dtype=torch.float64) * std
        is_gain = weight.dim() == 1 and not name.endswith("bias")
        weight.copy_(drawn + 1 if is_gain else drawn)
