"""GGUF files: the rows of their weights, read once and quietly, or one sentence."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from streamtap.activations import Activations, in_asked_order
from streamtap.engines import loading
from streamtap.engines.gguf_reading import parsed_once
from streamtap.engines.loading import load_model, save_dequantised
from streamtap.engines.transformers import TransformersEngine
from streamtap.errors import InvalidInput, MissingExtra
from streamtap.spec import CaptureSpec
from streamtap.testing.models import tiny_model

PROMPTS = [[5, 6, 7], [(7 * i) % 80 + 4 for i in range(60)]]


def capture(engine: TransformersEngine, prompts: Any = PROMPTS, **spec: Any) -> Activations:
    return in_asked_order(list(engine.capture(prompts, CaptureSpec(**spec))))


def assert_bit_equal(a: Activations, b: Activations) -> None:
    assert a.layers == b.layers
    assert all(np.array_equal(a.acts[k], b.acts[k]) for k in a.layers)


_TENSORS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def _interleaved(weight: Any, heads: int) -> Any:
    """Rows of a query or key matrix in the order that GGUF keeps them."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model: Any) -> None:
    """``model``, a Llama, as a GGUF file in float32 with a byte-level vocabulary."""
    config, writer = model.config, gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<s>", "</s>", "<pad>", "<unk>", *(chr(33 + i) for i in range(92)), "ab"])
    writer.add_token_types([3] * 4 + [1] * 93)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for name, weight in model.state_dict().items():
        path_in_model, values = name.removesuffix(".weight"), weight.numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        values = _interleaved(values, heads[path_in_model[-6:]]) if path_in_model[-6:] in heads else values
        if path_in_model in _OUTER:
            stored = _OUTER[path_in_model]
        else:
            _, _, number, inner = path_in_model.split(".", 3)
            stored = f"blk.{number}.{_TENSORS[inner]}"
        writer.add_tensor(f"{stored}.weight", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_gives_the_rows_of_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model("llama")
    write_gguf(tmp_path / "tiny.gguf", model)
    capfd.readouterr()

    engine = TransformersEngine.load(str(tmp_path / "tiny.gguf"))

    assert_bit_equal(capture(engine), capture(TransformersEngine(model)))
    assert capture(engine, ["ab!"]).token_ids.tolist() == [96, 4]
    assert engine.provenance.tokenizer == f"gguf:{engine.provenance.commit}"
    assert engine.provenance.quantization is None  # its weights were unpacked
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(loading, "_device", lambda _name: torch.device("meta"))
    assert load_model(str(tmp_path / "tiny.gguf")).model.device.type == "meta"


@pytest.mark.parametrize("content", [b"GGUF", b"GGUFjunk" * 9, b"hello" * 20])
def test_a_damaged_gguf_file_is_refused_in_one_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.gguf").write_bytes(content)

    with pytest.raises(InvalidInput, match=r"bad\.gguf.* could not be loaded") as caught:
        TransformersEngine.load(str(tmp_path / "bad.gguf"))
    assert "\n" not in str(caught.value)


def test_without_a_gguf_reader_the_message_is_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"))
    monkeypatch.setitem(sys.modules, "gguf", None)

    with pytest.raises(MissingExtra, match=r"pip install 'streamtap\[demo\]'"):
        TransformersEngine.load(str(tmp_path / "tiny.gguf"))


def test_what_is_unpacked_is_an_ordinary_folder_of_the_same_model(tmp_path: Path) -> None:
    model = tiny_model("llama")
    write_gguf(tmp_path / "tiny.gguf", model)

    save_dequantised(tmp_path / "tiny.gguf", tmp_path / "folder")
    engine = TransformersEngine.load(str(tmp_path / "folder"))

    assert engine.provenance.quantization is None
    assert_bit_equal(capture(engine), capture(TransformersEngine(model)))
    assert capture(engine, ["ab!"]).token_ids.tolist() == [96, 4]


def test_inside_a_file_is_parsed_once_and_afterwards_all_is_as_before(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"))
    before = (gguf.GGUFReader, gguf.get_tensor_name_map)

    with parsed_once():
        assert gguf.GGUFReader(tmp_path / "tiny.gguf") is gguf.GGUFReader(tmp_path / "tiny.gguf")
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == before
    with pytest.raises(FileNotFoundError), parsed_once():
        gguf.GGUFReader(tmp_path / "missing.gguf")

    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == before
