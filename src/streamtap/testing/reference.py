"""The plain reference that captures are measured against: one prompt, unpadded, the whole model.

Where blocks, norms and heads live is written down by hand for each model type, so that
nothing here depends on how Streamtap finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from streamtap.errors import InvalidInput

Hook = Callable[..., None]


class Layout(NamedTuple):
    """Module paths of one model type: the block list, and what a last row passes through to be logits."""

    blocks: str
    finish: tuple[str, ...]
    router: str | None = None


_COMMON = Layout("model.layers", ("model.norm", "lm_head"))
_WRAPPED = Layout("model.language_model.layers", ("model.language_model.norm", "lm_head"))
_TRANSFORMER = Layout("transformer.h", ("transformer.ln_f", "lm_head"))
_OPT_FINISH = ("model.decoder.final_layer_norm", "model.decoder.project_out", "lm_head")

LAYOUTS: dict[str, Layout] = {
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo2", "granite", "cohere"), _COMMON
    ),
    **dict.fromkeys(("mixtral", "qwen3_moe"), _COMMON._replace(router="mlp.gate")),
    "afmoe": _COMMON._replace(router="mlp.router"),
    **dict.fromkeys(("gemma3", "qwen3_vl"), _WRAPPED),
    **dict.fromkeys(("gpt2", "bloom", "falcon"), _TRANSFORMER),
    "gpt_neox": Layout("gpt_neox.layers", ("gpt_neox.final_layer_norm", "lm_head")),
    "opt": Layout("model.decoder.layers", _OPT_FINISH),
    "lfm2": Layout("model.layers", ("model.embedding_norm", "lm_head")),
    "mamba": Layout("backbone.layers", ("backbone.norm_f", "lm_head")),
}


def plain_blocks(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The decoder blocks, by the table."""
    return list(model.get_submodule(LAYOUTS[model.config.model_type].blocks))


@torch.no_grad()
def plain_rows(model: PreTrainedModel, token_ids: Sequence[int]) -> dict[int, torch.Tensor]:
    """Every block's output for one prompt, ``{layer: [tokens, hidden]}``, in the model's dtype."""
    rows: dict[int, torch.Tensor] = {}
    hooks = [_keeper(rows, k) for k in range(len(plain_blocks(model)))]
    with _hooked(plain_blocks(model), hooks):
        _forward(model, token_ids)
    return rows


@torch.no_grad()
def plain_logits(model: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """The model's own logits for one prompt, [tokens, vocabulary]."""
    logits: torch.Tensor = _forward(model, token_ids).logits[0]
    return logits


@torch.no_grad()
def finish(model: PreTrainedModel, rows: torch.Tensor) -> torch.Tensor:
    """Logits [rows, vocabulary] from the last block's ``rows`` [rows, hidden]: final norm, head, scale, cap."""
    for path in LAYOUTS[model.config.model_type].finish:
        parent, _, name = path.rpartition(".")
        module = getattr(model.get_submodule(parent), name)
        rows = rows if module is None else module(rows)  # OPT's are None in some checkpoints
    config = model.config.get_text_config()
    rows = rows / getattr(config, "logits_scaling", 1.0) * getattr(config, "logit_scale", 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    return rows if cap is None else cap * torch.tanh(rows / cap)


@torch.no_grad()
def routing_margins(model: PreTrainedModel, token_ids: Sequence[int]) -> dict[int, torch.Tensor]:
    """How far each token was from another choice of experts, ``{layer: [tokens]}``, for the layers that choose.

    The margin is the gap between the last router logit taken and the first left out.
    """
    path = LAYOUTS[model.config.model_type].router
    routed = {k: _router(block, path) for k, block in enumerate(plain_blocks(model))}
    routers = {k: router for k, router in routed.items() if router is not None}
    margins: dict[int, torch.Tensor] = {}
    hooks = [_margin_keeper(margins, k, model.config.num_experts_per_tok) for k in routers]
    with _hooked(list(routers.values()), hooks):
        _forward(model, token_ids)
    return margins


def comparable_rows(margins: Mapping[int, torch.Tensor], layer: int, tokens: int, margin: float) -> torch.Tensor:
    """Mask [tokens] of the rows at ``layer`` that rounding cannot have sent to other experts.

    A row hangs on every earlier position in every block up to its own, so one choice nearer
    than ``margin`` leaves out all rows from its position on.
    """
    kept = torch.ones(tokens, dtype=torch.bool)
    for k, gaps in margins.items():
        if k <= layer:
            kept &= torch.cummin(gaps, dim=0).values > margin
    return kept


def worst_row_error(rows: NDArray[Any], reference: torch.Tensor) -> float:
    """The largest ‖a − b‖ / ‖b‖ over rows, of ``rows`` and ``reference`` [rows, hidden], in float64."""
    a, b = torch.from_numpy(rows.astype(np.float64)), reference.double()
    if a.shape != b.shape:
        raise InvalidInput(f"rows have shape {tuple(a.shape)}; the reference has {tuple(b.shape)}.")
    return float(((a - b).norm(dim=-1) / b.norm(dim=-1)).max()) if len(b) else 0.0


def _forward(model: PreTrainedModel, token_ids: Sequence[int]) -> Any:
    return model(input_ids=torch.tensor([list(token_ids)]), use_cache=False)


@contextmanager
def _hooked(modules: Sequence[torch.nn.Module], hooks: Sequence[Hook]) -> Iterator[None]:
    handles = [module.register_forward_hook(hook) for module, hook in zip(modules, hooks, strict=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _keeper(rows: dict[int, torch.Tensor], layer: int) -> Hook:
    def keep(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        hidden = output if isinstance(output, torch.Tensor) else output[0]
        rows[layer] = hidden[0].clone()

    return keep


def _margin_keeper(margins: dict[int, torch.Tensor], layer: int, top_k: int) -> Hook:
    def keep(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        logits = output[0].double()
        ordered = logits.reshape(-1, logits.shape[-1]).sort(dim=-1, descending=True).values
        margins[layer] = ordered[:, top_k - 1] - ordered[:, top_k]

    return keep


def _router(block: torch.nn.Module, path: str | None) -> torch.nn.Module | None:
    if path is None:
        return None
    try:
        return block.get_submodule(path)
    except AttributeError:
        return None  # a dense block among mixtures
