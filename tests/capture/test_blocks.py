"""Blocks are found by structure in every family, in the text decoder only, or refused by name."""

from __future__ import annotations

from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, PreTrainedModel

from streamtap.capture.blocks import find_blocks
from streamtap.errors import UnsupportedModel
from streamtap.testing.models import FAMILIES, tiny_model
from streamtap.testing.reference import LAYOUTS, plain_blocks


@lru_cache(maxsize=1)
def model_of(family: str) -> PreTrainedModel:
    return tiny_model(family, n_layers=3)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_blocks_are_those_of_the_table(family: str) -> None:
    model = model_of(family)

    blocks = find_blocks(model)

    assert blocks.path == LAYOUTS[model.config.model_type].blocks
    assert list(blocks.modules) == plain_blocks(model)
    assert (blocks.n_layers, blocks.hidden) == (3, 32)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("n_layers", [1, 4])
def test_another_depth_is_found_too(family: str, n_layers: int) -> None:
    # Four layers are as many as there are experts; one is as short as a list can be.
    model = tiny_model(family, n_layers=n_layers, hidden=16 if family != "qwen3_vl" else 32)

    assert list(find_blocks(model).modules) == plain_blocks(model)


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "bloom", "gemma3_multimodal", "mamba"])
def test_a_model_without_head_has_the_same_blocks(family: str) -> None:
    model = model_of(family)

    assert find_blocks(model.base_model).modules == find_blocks(model).modules


@pytest.mark.parametrize("family", ["gemma3_multimodal", "gemma3_multimodal_equal_depth", "qwen3_vl"])
def test_no_block_of_a_vision_tower_is_taken(family: str) -> None:
    model = model_of(family)
    vision = {id(module) for name, module in model.named_modules() if "vis" in name}

    assert vision
    assert not vision & {id(block) for block in find_blocks(model).modules}


def test_every_vision_depth_gives_the_text_blocks() -> None:
    config = tiny_model("gemma3_multimodal").config.vision_config.to_dict()
    for depth in (1, 2, 3, 4, 7):
        model = tiny_model("gemma3_multimodal", vision_config={**config, "num_hidden_layers": depth})

        assert find_blocks(model).path == "model.language_model.layers"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_body_runs_all_blocks_and_no_head(family: str) -> None:
    model = tiny_model(family)
    ran: list[nn.Module] = []
    for module in (*plain_blocks(model), model.get_output_embeddings()):
        module.register_forward_hook(lambda module, _i, _o: ran.append(module))

    with torch.no_grad():
        find_blocks(model).body(input_ids=torch.tensor([[3, 4, 5]]))

    assert ran == plain_blocks(model)


def test_an_encoder_decoder_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="T5ForConditionalGeneration.*decoder-only"):
        find_blocks(tiny_model("t5"))


def test_a_module_without_config_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="Sequential"):
        find_blocks(nn.Sequential(nn.Linear(2, 2)))


def _block() -> nn.Module:
    block = nn.Module()
    block.attention, block.mlp = nn.Linear(8, 8), nn.Linear(8, 8)
    return block


class _Stub(nn.Module):
    """A model of module lists under given names, whose config says it has three layers."""

    def __init__(self, lists: dict[str, int], config: Any = None) -> None:
        super().__init__()
        self.config = config or LlamaConfig(num_hidden_layers=3, hidden_size=8, num_attention_heads=2)
        for path, length in lists.items():
            self._put(path.split("."), nn.ModuleList(_block() for _ in range(length)))

    def _put(self, names: list[str], modules: nn.ModuleList) -> None:
        parent: nn.Module = self
        for name in names[:-1]:
            if not hasattr(parent, name):
                parent.add_module(name, nn.Module())
            parent = getattr(parent, name)
        parent.add_module(names[-1], modules)


def test_an_unknown_layout_is_found_by_its_depth() -> None:
    stub = _Stub({"trunk.stages": 3, "extras": 2, "vision.layers": 3})

    assert find_blocks(stub).path == "trunk.stages"


def test_two_lists_that_fit_are_refused_with_both_named() -> None:
    stub = _Stub({"left.layers": 3, "right.layers": 3})

    with pytest.raises(UnsupportedModel, match=r"left\.layers.*right\.layers"):
        find_blocks(stub)


def test_no_list_that_fits_is_refused_with_the_candidates_named() -> None:
    stub = _Stub({"body.layers": 5, "vision_tower.layers": 3})

    with pytest.raises(UnsupportedModel, match=r"_Stub.*3.*body\.layers.*vision_tower\.layers"):
        find_blocks(stub)


def test_experts_as_many_as_the_blocks_are_not_mistaken_for_them() -> None:
    stub = _Stub({"model.layers": 3})
    for block in stub.model.layers:  # type: ignore[union-attr]
        block.experts = nn.ModuleList(_block() for _ in range(3))

    assert find_blocks(stub).path == "model.layers"


def test_a_list_of_norms_as_long_as_the_blocks_is_not_mistaken_for_them() -> None:
    stub = _Stub({"model.layers": 3})
    stub.model.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(3))  # type: ignore[union-attr]

    assert find_blocks(stub).path == "model.layers"


def test_a_config_that_hides_its_depth_is_refused() -> None:
    config = SimpleNamespace(is_encoder_decoder=False)
    config.get_text_config = lambda decoder=False: config

    with pytest.raises(UnsupportedModel, match="num_hidden_layers"):
        find_blocks(_Stub({"model.layers": 3}, config))
