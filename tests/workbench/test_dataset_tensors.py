from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch

from streamtap.errors import InvalidInput, NotInDataset
from streamtap.workbench.dataset_rows import load_activations, load_rows
from streamtap.workbench.dataset_tensors import load_activation_dataset

Bench = Any
PROMPTS = ["The sky", "is blue at noon", "x", "and red", "in the evening"]
pytestmark = pytest.mark.filterwarnings("ignore:.*older format version")


@pytest.mark.parametrize("sample", ["v1-0-colocated", "v1-2-pooled-logits", "v2-pooled-multishard", "v2-pooled-mean"])
def test_tensors_of_a_pooled_dataset_lie_in_the_order_of_its_index(
    sample: str, bench: Bench, expected: dict[str, Any]
) -> None:
    tensors, info = load_activation_dataset(bench.sample(sample))
    wanted = {
        key.removeprefix(f"{sample}/").replace("layer_", "hidden.layer_"): each
        for key, each in expected.items()
        if key.startswith((f"{sample}/layer_", f"{sample}/logits"))
    }

    assert set(tensors) == set(wanted)
    assert all(isinstance(tensor, torch.Tensor) for tensor in tensors.values())
    assert all(np.array_equal(tensors[key].numpy(), wanted[key]) for key in wanted)
    assert info["model"]["name"] == "example/SmolLM2-135M-Instruct-dequant"
    assert info["num_prompts"] == len(wanted[min(wanted)])


def test_tensors_of_a_full_sequence_are_the_last_tokens_and_then_the_others(
    bench: Bench, expected: dict[str, Any]
) -> None:
    name = "v2-full-sequence"
    tensors, _ = load_activation_dataset(bench.sample(name), layers=[15])
    lengths, rows = expected[f"{name}/tokens/lengths"], expected[f"{name}/tokens/layer_15"]
    ends = np.cumsum(lengths) - 1

    found = tensors["hidden.layer_15"].numpy()
    assert np.array_equal(found[: len(ends)], rows[ends])
    assert np.array_equal(found[len(ends) :], np.delete(rows, ends, axis=0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_are_float32_whatever_is_stored(dtype: str, bench: Bench) -> None:
    bench.fill(PROMPTS, bench.engine(dtype=dtype), cache_logits=True, logit_top_k=3)
    where = bench.push(PROMPTS, shard_max_bytes=64)
    tensors, info = load_activation_dataset(where)

    assert {key: str(tensor.dtype) for key, tensor in tensors.items()} == {
        **{f"hidden.layer_{layer}": "torch.float32" for layer in range(4)},
        "logits_topk.values": "torch.float32",
        "logits_topk.indices": "torch.int32",
    }
    acts = load_activations(where)
    assert all(np.array_equal(tensors[f"hidden.layer_{layer}"].numpy(), acts[layer]) for layer in acts)
    assert info["tensors"]["hidden_layers"]["dtype"] == dtype


def test_tensors_and_layers_choose(bench: Bench) -> None:
    bench.fill(PROMPTS, cache_logits=True, logit_top_k=3)
    where = bench.push(PROMPTS)

    assert set(load_activation_dataset(where, layers=-1)[0]) == {
        "hidden.layer_3",
        "logits_topk.values",
        "logits_topk.indices",
    }
    assert set(load_activation_dataset(where, ["hidden_layers"], [1, 2])[0]) == {"hidden.layer_1", "hidden.layer_2"}
    assert set(load_activation_dataset(where, "logits_topk")[0]) == {"logits_topk.values", "logits_topk.indices"}
    with pytest.raises(InvalidInput, match="tensors are 'hidden_layers' and 'logits_topk'; got 'hidden'"):
        load_activation_dataset(where, ["hidden"])
    with pytest.raises(InvalidInput, match="tensors must name some"):
        load_activation_dataset(where, [])
    only = bench.push(PROMPTS, "only", tensors=["hidden_layers"])
    with pytest.raises(NotInDataset, match="holds no logits"):
        load_activation_dataset(only, ["logits_topk"])


def test_the_sample_runs_where_torch_is_not_installed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.fill(PROMPTS)
    where = bench.push(PROMPTS)
    with_torch = load_activation_dataset(where)[0]["hidden.layer_2"].numpy()
    monkeypatch.setitem(sys.modules, "torch", None)
    tensors, _ = load_activation_dataset(where, layers=[2])
    found = tensors["hidden.layer_2"]

    assert type(found.numpy()) is np.ndarray
    assert found.shape == (5, 8)
    assert np.array_equal(found.numpy(), with_torch)
    assert np.array_equal(found[1:3].numpy(), with_torch[1:3])
    assert np.array_equal(found, load_rows(where, 2).acts[2])
