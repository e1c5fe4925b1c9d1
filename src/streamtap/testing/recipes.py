"""How a tiny model of each family is built: class names of transformers and config fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

VOCABULARY = 97
CONTEXT_TOKENS = 256
#: Shorter than the longer test prompts, so that a window that is lost shows.
WINDOW_TOKENS = 12
WEIGHT_STD = 0.5
_SPECIAL = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


class Size(NamedTuple):
    """What a tiny model measures."""

    n_layers: int
    hidden: int


class Recipe(NamedTuple):
    """How one family's tiny model is built: two class names of transformers, config fields, and the weights' size."""

    model: str
    config: str
    fields: Callable[[Size], Mapping[str, Any]]
    std: float = WEIGHT_STD


def _llama(size: Size, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": size.hidden,
        "intermediate_size": 2 * size.hidden,
        "num_hidden_layers": size.n_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT_TOKENS,
        **_SPECIAL,
        **more,
    }


def _headed(size: Size, **more: Any) -> dict[str, Any]:
    return _llama(size, head_dim=size.hidden // 4, **more)


def _alternating(size: Size, **more: Any) -> dict[str, Any]:
    kinds = ["sliding_attention", "full_attention"]
    layer_types = [kinds[k % 2] for k in range(size.n_layers)]
    return _headed(size, sliding_window=WINDOW_TOKENS, layer_types=layer_types, **more)


def _gemma(size: Size, **more: Any) -> dict[str, Any]:
    return _alternating(size, query_pre_attn_scalar=size.hidden // 4, **more)


def _gemma2(size: Size) -> dict[str, Any]:
    return _gemma(size, attn_logit_softcapping=20.0, final_logit_softcapping=10.0)


def _gemma3_wrapped(size: Size, vision_depth: int) -> dict[str, Any]:
    vision = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": vision_depth,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
    }
    ids = {"boi_token_index": 90, "eoi_token_index": 91, "image_token_index": 92}
    return {"text_config": _gemma(size), "vision_config": vision, "mm_tokens_per_image": 4, **ids}


def _qwen3_vl(size: Size) -> dict[str, Any]:
    vision = {
        "depth": size.n_layers + 2,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "patch_size": 8,
        "out_hidden_size": size.hidden,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
    }
    rotary = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    ids = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
    text = _headed(size, rope_parameters=rotary)
    return {"text_config": text, "vision_config": vision, **ids}


def _gpt2(size: Size) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "n_embd": size.hidden,
        "n_layer": size.n_layers,
        "n_head": 4,
        "n_positions": CONTEXT_TOKENS,
        **_SPECIAL,
    }


def _opt(size: Size, *, pre_norm: bool) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": size.hidden,
        "ffn_dim": 2 * size.hidden,
        "num_hidden_layers": size.n_layers,
        "num_attention_heads": 4,
        "max_position_embeddings": CONTEXT_TOKENS,
        "do_layer_norm_before": pre_norm,
        # as in the one released checkpoint that norms afterwards: narrower embeddings, projected in and out
        "word_embed_proj_dim": size.hidden if pre_norm else size.hidden // 2,
        **_SPECIAL,
    }


def _bloom(size: Size) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": size.hidden,
        "n_layer": size.n_layers,
        "n_head": 4,
        **_SPECIAL,
    }


def _falcon(size: Size, *, alibi: bool) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": size.hidden,
        "num_hidden_layers": size.n_layers,
        "num_attention_heads": 4,
        "max_position_embeddings": CONTEXT_TOKENS,
        "alibi": alibi,
        "multi_query": not alibi,
        "parallel_attn": not alibi,
        **_SPECIAL,
    }


def _granite(size: Size) -> dict[str, Any]:
    scales = {"embedding_multiplier": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.3}
    return _llama(size, logits_scaling=4.0, **scales)


def _afmoe(size: Size) -> dict[str, Any]:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 1, "num_dense_layers": 1}
    return _alternating(size, moe_intermediate_size=size.hidden, mup_enabled=True, **experts)


def _qwen3_moe(size: Size) -> dict[str, Any]:
    return _headed(size, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=size.hidden)


def _mamba(size: Size) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": size.hidden,
        "num_hidden_layers": size.n_layers,
        "state_size": 4,
        **_SPECIAL,
    }


def _lfm2(size: Size) -> dict[str, Any]:
    kinds = ["conv", "full_attention"]
    layer_types = [kinds[k % 2] for k in range(size.n_layers)]
    return _llama(size, layer_types=layer_types, block_auto_adjust_ff_dim=False)


def _t5(size: Size) -> dict[str, Any]:
    return {"vocab_size": VOCABULARY, "d_model": size.hidden, "num_layers": size.n_layers, "num_heads": 4, "d_ff": 64}


RECIPES: dict[str, Recipe] = {
    "llama": Recipe("LlamaForCausalLM", "LlamaConfig", _llama),
    "mistral": Recipe("MistralForCausalLM", "MistralConfig", lambda size: _llama(size, sliding_window=WINDOW_TOKENS)),
    "qwen2": Recipe("Qwen2ForCausalLM", "Qwen2Config", _llama),
    "qwen3": Recipe("Qwen3ForCausalLM", "Qwen3Config", _headed),
    "gemma2": Recipe("Gemma2ForCausalLM", "Gemma2Config", _gemma2),
    "gemma3": Recipe("Gemma3ForCausalLM", "Gemma3TextConfig", _gemma),
    "gemma3_multimodal": Recipe(
        "Gemma3ForConditionalGeneration", "Gemma3Config", lambda size: _gemma3_wrapped(size, size.n_layers + 2)
    ),
    "gemma3_multimodal_equal_depth": Recipe(
        "Gemma3ForConditionalGeneration", "Gemma3Config", lambda size: _gemma3_wrapped(size, size.n_layers)
    ),
    "qwen3_vl": Recipe("Qwen3VLForConditionalGeneration", "Qwen3VLConfig", _qwen3_vl),
    "gpt2": Recipe("GPT2LMHeadModel", "GPT2Config", _gpt2),
    "gpt_neox": Recipe("GPTNeoXForCausalLM", "GPTNeoXConfig", _llama),
    "opt": Recipe("OPTForCausalLM", "OPTConfig", lambda size: _opt(size, pre_norm=True)),
    "opt_post_norm": Recipe("OPTForCausalLM", "OPTConfig", lambda size: _opt(size, pre_norm=False)),
    "bloom": Recipe("BloomForCausalLM", "BloomConfig", _bloom),
    "phi3": Recipe("Phi3ForCausalLM", "Phi3Config", _llama),
    "mixtral": Recipe("MixtralForCausalLM", "MixtralConfig", lambda size: _llama(size, num_local_experts=4)),
    "qwen3_moe": Recipe("Qwen3MoeForCausalLM", "Qwen3MoeConfig", _qwen3_moe),
    "afmoe": Recipe("AfmoeForCausalLM", "AfmoeConfig", _afmoe),
    "olmo2": Recipe("Olmo2ForCausalLM", "Olmo2Config", _llama),
    "falcon": Recipe("FalconForCausalLM", "FalconConfig", lambda size: _falcon(size, alibi=False)),
    "falcon_alibi": Recipe("FalconForCausalLM", "FalconConfig", lambda size: _falcon(size, alibi=True)),
    "granite": Recipe("GraniteForCausalLM", "GraniteConfig", _granite),
    "cohere": Recipe("CohereForCausalLM", "CohereConfig", lambda size: _llama(size, logit_scale=0.25)),
    "lfm2": Recipe("Lfm2ForCausalLM", "Lfm2Config", _lfm2),
    # At 0.5 its recurrence makes more of float32's rounding than a batch is allowed to differ by.
    "mamba": Recipe("MambaForCausalLM", "MambaConfig", _mamba, std=0.3),
    "t5": Recipe("T5ForConditionalGeneration", "T5Config", _t5),
}
