"""nnsight's tree over a model: one that was loaded here, or one whose weights are elsewhere."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from nnsight.modeling.transformers import TransformersModel
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from streamtap.capture.blocks import find_blocks
from streamtap.capture.forward import Forward
from streamtap.capture.passes import follows_the_longest
from streamtap.engines.tokenizer_files import first_line, quiet_transformers
from streamtap.errors import UnsupportedModel

_TASK = "text-generation"
_NO_TOKEN = "?"


@dataclass(frozen=True, eq=False)
class Tree:
    """nnsight's tree and, in it, the decoder blocks: ``blocks[k].output`` is layer k's activation.

    ``alone`` says that a sequence's values depend on the longest one beside it, so that each has to run by itself.
    """

    model: Any
    blocks: tuple[Any, ...]
    alone: bool


def tree_over(module: Any, tokenizer: Any) -> Tree:
    """The tree over a loaded ``transformers`` model, which stays on its device.

    Raises:
        UnsupportedModel: its decoder blocks were not found.
    """
    placed = {} if getattr(module, "hf_device_map", None) is not None else {"device": module.device}
    return _tree(TransformersModel(module, task=_TASK, tokenizer=_own(tokenizer), **placed))


def tree_without_weights(folder: Path, name: str, tokenizer: Any, attention: str | None) -> Tree:
    """The tree of the model whose config lies in ``folder``: the same modules, with no values and no file of weights.

    Raises:
        UnsupportedModel: it is no causal language model, or its decoder blocks were not found.
    """
    options = {} if attention is None else {"attn_implementation": attention}
    try:
        with quiet_transformers():
            model: Any = TransformersModel(str(folder), task=_TASK, tokenizer=_own(tokenizer), **options)
    except (ValueError, KeyError) as error:
        raise UnsupportedModel(
            f"{name!r} is not a causal language model of transformers, by its config: {first_line(error)}"
        ) from error
    # They travel with a request, and a folder of this machine is nobody's business.
    model.repo_id, model.args = name, (name,)
    return _tree(model)


def _tree(model: Any) -> Tree:
    module: torch.nn.Module = model._module
    found = find_blocks(module)
    places = dict(model.named_modules())
    blocks = tuple(places[f"{model.path}.{found.path}.{k}"] for k in range(found.n_layers))
    return Tree(model, blocks, follows_the_longest(Forward(module)))


def _own(tokenizer: Any) -> Any:
    """A tokenizer that nnsight may set up as it likes; any will do, for it is never asked."""
    if tokenizer is not None:
        return copy.deepcopy(tokenizer)
    backend = Tokenizer(models.WordLevel({_NO_TOKEN: 0}, unk_token=_NO_TOKEN))
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=_NO_TOKEN, pad_token=_NO_TOKEN)
