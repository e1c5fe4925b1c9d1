"""Faults that people met in tools like this one, by their number in the cases: each test holds the right value."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from streamtap.activations import Activations, in_asked_order
from streamtap.engines.transformers import TransformersEngine
from streamtap.errors import CaptureMissed, InvalidLayers, UnsupportedModel, UnsupportedSite
from streamtap.layers import from_hidden_states_index, to_hidden_states_index
from streamtap.spec import CaptureSpec
from streamtap.testing.models import FAMILIES, tiny_model
from streamtap.testing.reference import LAYOUTS, plain_blocks, plain_rows, worst_row_error

SHORT, LONG = [5, 6, 7], [(7 * i) % 80 + 4 for i in range(60)]
SHARED = [LONG[:48] + tail for tail in ([9], [10, 11, 12], [13] * 7, [14, 15, 16, 17], [18] * 12)]
TEXTS = ["No.", "The residual stream is what every block reads and adds to."]


def capture(model: Any, prompts: Sequence[Any], tokenizer: Any = None, **spec: Any) -> Activations:
    engine = TransformersEngine(model, tokenizer, name="tiny")
    return in_asked_order(list(engine.capture(prompts, CaptureSpec(**spec))))


def hidden_states(model: PreTrainedModel, ids: list[int]) -> list[torch.Tensor]:
    with torch.no_grad():
        output = model(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    return [state[0] for state in output.hidden_states]


def relative(a: Any, b: Any) -> float:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


# V01: the last entry of hidden_states is normed in most models, and a config switch can turn that off


@pytest.mark.parametrize(("family", "norm"), [("llama", "model.norm"), ("gpt2", "transformer.ln_f")])
@pytest.mark.parametrize("tied", [None, True, False])
def test_v01_the_last_layer_is_raw_whatever_hidden_states_hold(family: str, norm: str, tied: bool | None) -> None:
    model = tiny_model(family)
    if tied is not None:
        model.config.tie_last_hidden_states = tied
    states = hidden_states(model, LONG)

    rows = capture(model, [LONG], exact=True).acts

    for layer in (0, 1):
        assert np.array_equal(rows[layer], states[layer + 1].numpy())
    normed = model.get_submodule(norm)(torch.from_numpy(rows[2])).detach().numpy()
    if tied is False:
        assert np.array_equal(rows[2], states[3].numpy())
    else:
        assert relative(rows[2], states[3]) > 0.1
        assert relative(normed, states[3]) <= 1e-6


# V02: capture happens on the checkpoint as it is


@pytest.mark.parametrize("family", FAMILIES)
def test_v02_rows_are_those_of_the_unmodified_model(family: str) -> None:
    model = tiny_model(family, seed=2)
    plain = plain_rows(model, LONG)

    rows = capture(model, [LONG], exact=True).acts

    assert all(worst_row_error(rows[layer], plain[layer]) <= 1e-6 for layer in plain)


def test_v02_processed_weights_are_another_model(tmp_path: Path) -> None:
    model: Any = tiny_model("llama")
    model.save_pretrained(tmp_path / "plain")
    with torch.no_grad():  # centred, as some tools do it
        model.model.layers[1].mlp.down_proj.weight.sub_(model.model.layers[1].mlp.down_proj.weight.mean(0))
    model.save_pretrained(tmp_path / "centred")

    plain, centred = (TransformersEngine.load(str(tmp_path / name)).provenance for name in ("plain", "centred"))

    assert plain.commit != centred.commit
    assert plain.commit.startswith("sha256:")


# V03: attention and MLP outputs are not one quantity in every family


@pytest.mark.parametrize("site", ["attn_out", "mlp_out", "resid_mid", "resid_pre", "embed", "final_norm", ""])
def test_v03_any_other_site_is_refused_by_name(site: str) -> None:
    with pytest.raises(UnsupportedSite, match=f"{site!r}.*block_output"):
        CaptureSpec(site=site)


@pytest.mark.parametrize("family", ["bloom", "llama", "olmo2", "granite"])
def test_v03_the_site_we_offer_is_the_stream_itself(family: str) -> None:
    model = tiny_model(family)
    entered: list[torch.Tensor] = []
    handle = plain_blocks(model)[2].register_forward_pre_hook(
        lambda _m, args, kwargs: entered.append((args or tuple(kwargs.values()))[0][0]), with_kwargs=True
    )
    plain_rows(model, LONG)
    handle.remove()

    assert np.array_equal(capture(model, [LONG], exact=True, layers=[1]).acts[1], entered[0].numpy())


# V04: layer numbers off by one


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "opt", "qwen3_vl"])
def test_v04_layer_k_is_the_output_of_block_k(family: str) -> None:
    model = tiny_model(family)
    states = hidden_states(model, LONG)

    rows = capture(model, [LONG], exact=True).acts

    assert sorted(rows) == [0, 1, 2]
    for layer in (0, 1):
        assert np.array_equal(rows[layer], states[to_hidden_states_index(layer)].numpy())
        assert from_hidden_states_index(to_hidden_states_index(layer)) == layer
    assert relative(rows[0], states[0]) > 0.1


def test_v04_negative_layers_count_from_the_last_and_too_large_ones_are_refused() -> None:
    model = tiny_model("llama")

    assert capture(model, [SHORT], layers=-1).layers == (2,)
    assert capture(model, [SHORT], layers=[-3, -1]).layers == (0, 2)
    for layer in (3, -4):
        with pytest.raises(InvalidLayers, match="3 blocks"):
            capture(model, [SHORT], layers=layer)


# V06: decoder layers live somewhere else


@pytest.mark.parametrize("family", ["gemma3_multimodal", "gemma3_multimodal_equal_depth", "qwen3_vl"])
def test_v06_a_multimodal_model_gives_its_text_blocks(family: str) -> None:
    model = tiny_model(family)
    assert not hasattr(model.config, "num_hidden_layers")
    plain = plain_rows(model, LONG)

    engine = TransformersEngine(model, name="tiny")
    acts = in_asked_order(list(engine.capture([LONG], CaptureSpec())))

    assert (engine.n_layers, engine.hidden) == (3, 32)
    assert LAYOUTS[model.config.model_type].blocks == "model.language_model.layers"
    assert all(worst_row_error(acts.acts[layer], plain[layer]) <= 1e-5 for layer in plain)


def test_v06_an_encoder_decoder_is_refused_by_its_class() -> None:
    with pytest.raises(UnsupportedModel, match="T5ForConditionalGeneration"):
        TransformersEngine(tiny_model("t5"), name="tiny")


# V11: batch against single, with a tolerance per dtype


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gemma2", "opt", "bloom", "falcon"])
def test_v11_float32_agrees_tightly_between_batch_and_single(family: str) -> None:
    model = tiny_model(family, std=0.3)

    pair = capture(model, [SHORT, LONG])

    for i, ids in enumerate([SHORT, LONG]):
        alone = capture(model, [ids])
        assert all(np.abs(pair.prompt(i)[k] - alone.acts[k]).max() <= 1e-4 for k in alone.layers)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gemma3", "opt", "qwen3"])
def test_v11_bfloat16_stays_within_its_rounding(family: str) -> None:
    model = tiny_model(family, dtype=torch.bfloat16)

    pair = capture(model, [SHORT, LONG])

    for i, ids in enumerate([SHORT, LONG]):
        alone = capture(model, [ids])
        assert alone.acts[0].dtype.name == "bfloat16"
        assert all(relative(pair.prompt(i)[k], alone.acts[k]) <= 2e-2 for k in alone.layers)


def test_v11_a_batch_of_one_can_be_had_and_the_kernel_is_recorded() -> None:
    model = tiny_model("llama", dtype=torch.bfloat16)

    exact = capture(model, [SHORT, LONG, *SHARED], exact=True)

    assert exact.provenance.attention == "sdpa"
    assert exact.provenance.dtype == "bfloat16"
    for i, ids in enumerate([SHORT, LONG, *SHARED]):
        for layer, rows in plain_rows(model, ids).items():
            assert np.array_equal(exact.prompt(i)[layer].astype(np.float32), rows.float().numpy())


# V12: a device that silently returns zeros or wrong numbers


@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
@pytest.mark.parametrize("pooling", ["none", "mean", "last_token"])
def test_v12_dead_layers_are_refused_and_named(first: int, value: float, pooling: str) -> None:
    model = tiny_model("gpt2")
    for block in plain_blocks(model)[first:]:
        block.register_forward_hook(lambda _m, _i, output: torch.full_like(output, value))

    with pytest.raises(CaptureMissed, match=f"block {first} ") as caught:
        capture(model, [SHORT, LONG], pooling=pooling)
    assert caught.value.layer == first


@pytest.mark.parametrize("prompts", [[SHORT, LONG], SHARED], ids=["pair", "shared"])
def test_v12_one_value_that_is_not_finite_is_found_though_no_row_of_it_is_kept(prompts: list[list[int]]) -> None:
    model = tiny_model("gpt2")

    def spoil(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        output[0, 1, 3] = float("nan")
        return output

    plain_blocks(model)[2].register_forward_hook(spoil)

    with pytest.raises(CaptureMissed, match=r"block 2 .*prompt \d, position \d+") as caught:
        capture(model, prompts, positions="last")
    assert caught.value.layer == 2


# V25: capturing everything when one layer is wanted


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_multimodal", "mamba", "opt", "falcon"])
@pytest.mark.parametrize("prompts", [[SHORT, LONG], SHARED], ids=["pair", "shared"])
def test_v25_nothing_behind_the_last_layer_asked_for_runs(family: str, prompts: list[list[int]]) -> None:
    model = tiny_model(family)
    ran: list[int] = []
    blocks = plain_blocks(model)
    engine = TransformersEngine(model, name="tiny")
    list(engine.capture(SHARED, CaptureSpec(layers=[0])))  # what is checked once for a model is over
    for k, block in enumerate(blocks):
        block.register_forward_hook(lambda *_, k=k: ran.append(k))
    model.get_output_embeddings().register_forward_hook(lambda *_: ran.append(99))

    acts = in_asked_order(list(engine.capture(prompts, CaptureSpec(layers=[0]))))
    assert acts.layers == (0,)
    assert set(ran) == {0}

    list(engine.capture(prompts, CaptureSpec(layers=[1])))
    assert set(ran) == {0, 1}

    list(engine.capture(prompts, CaptureSpec(layers="all")))
    assert set(ran) == {0, 1, 2}


@pytest.mark.parametrize("layers", ["blocks.0", "layer0", "attn", "", "0-9", [0, 7], True, 1.0])
def test_v25_a_filter_that_names_nothing_is_refused(layers: Any) -> None:
    with pytest.raises(InvalidLayers):
        capture(tiny_model("llama"), [SHORT], layers=layers)


def test_v25_the_head_never_sees_more_positions_than_are_kept() -> None:
    model = tiny_model("llama")
    engine = TransformersEngine(model, name="tiny")
    list(engine.capture([SHORT], CaptureSpec(layers=[0], logits="last")))
    rows: list[int] = []
    model.get_output_embeddings().register_forward_hook(lambda _m, _i, output: rows.append(output[..., 0].numel()))

    list(engine.capture([SHORT, LONG], CaptureSpec(layers=[0], logits="last")))

    assert sum(rows) == 2
