"""Find the decoder blocks of any ``transformers`` model by structure, not by name.

The blocks are the one list of modules that is as long as the text config says the model is
deep, inside the text decoder and outside every vision or audio tower.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from streamtap.errors import UnsupportedModel

# Towers of other modalities: a list of blocks under one of these is never the text decoder's.
_OTHER_TOWERS = ("vision", "visual", "image", "audio", "speech", "video", "encoder", "projector", "mtp")


@dataclass(frozen=True)
class Blocks:
    """The decoder blocks of a model and the body that runs them.

    ``modules[k]`` is block k; its output is the residual stream [batch, positions, hidden].
    ``body`` is the model without its head: calling it with token ids runs every block and the
    final norm.
    """

    path: str
    modules: tuple[nn.Module, ...]
    body: nn.Module
    text_config: Any
    hidden: int

    @property
    def n_layers(self) -> int:
        """Number of blocks."""
        return len(self.modules)


def find_blocks(model: nn.Module) -> Blocks:
    """The decoder blocks of ``model``.

    Raises:
        UnsupportedModel: it is not decoder-only, or no single list of modules fits its depth;
            the message names every candidate.
    """
    name = type(model).__name__
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise UnsupportedModel(f"{name} has no transformers config; expected a decoder-only transformers model.")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name} is an encoder-decoder model; Streamtap reads decoder-only models.")
    text_config = config.get_text_config(decoder=True)
    depth, hidden = getattr(text_config, "num_hidden_layers", None), getattr(text_config, "hidden_size", None)
    if not isinstance(depth, int) or not isinstance(hidden, int):
        raise UnsupportedModel(
            f"the text config of {name} ({type(text_config).__name__}) gives no num_hidden_layers and hidden_size; "
            "expected both as whole numbers."
        )
    path, blocks = _only_fit(model, depth)
    return Blocks(path, tuple(blocks), _body(model), text_config, hidden)


def _only_fit(model: nn.Module, depth: int) -> tuple[str, nn.ModuleList]:
    lists = [(path, module) for path, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outer = [(path, module) for path, module in lists if not _inside_another(path, lists, depth)]
    fits = [(path, module) for path, module in outer if len(module) == depth and not _in_other_tower(path)]
    if len(fits) > 1:
        fits = [(path, module) for path, module in fits if _attends_or_mixes(module)] or fits
    if len(fits) == 1:
        return fits[0]
    shown = "; ".join(f"{path} ({len(module)} x {_kinds(module)})" for path, module in outer if len(module)) or "none"
    found = "no list of modules" if not fits else f"{len(fits)} lists of modules"
    raise UnsupportedModel(
        f"{found} in {type(model).__name__} fits the {depth} blocks of its text config. Lists found: {shown}."
    )


def _inside_another(path: str, lists: list[tuple[str, nn.ModuleList]], depth: int) -> bool:
    # Experts or convolutions inside a block may be as many as the blocks.
    return any(path.startswith(other + ".") and len(module) == depth for other, module in lists)


def _in_other_tower(path: str) -> bool:
    return any(word in part for part in path.lower().split(".")[:-1] for word in _OTHER_TOWERS)


def _attends_or_mixes(blocks: nn.ModuleList) -> bool:
    # A decoder block holds several sub-modules with weights; lists of bare norms or projections do not.
    return all(sum(1 for _ in block.children()) >= 2 for block in blocks)


def _kinds(blocks: nn.ModuleList) -> str:
    return "/".join(sorted({type(block).__name__ for block in blocks}))


def _body(model: nn.Module) -> nn.Module:
    body = getattr(model, "base_model", model)
    return body if isinstance(body, nn.Module) else model
