"""Jobs of ``lmprobe`` in its own environment; nothing of ours is imported here.

It reads one JSON object a line, ``{"do": name, "with": arguments, "cache": folder, "out": file}``.
It answers each with a line: empty when what the job found is in ``out`` (.npz), else its traceback as JSON. The library
and what it imports late are imported once; every job runs in a fork of its own, so that none finds what another left in
memory.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import accelerate
import huggingface_hub
import lmprobe
import numpy as np
import pyarrow.parquet
import torch
import transformers
from lmprobe import cache
from lmprobe.sharing import (
    fetch_dataset_metadata,
    load_activation_dataset,
    load_activations,
    pull_dataset,
    push_dataset,
    upgrade_dataset_format,
)

Found = dict[str, Any]

#: Imported here so that no job does it again.
EARLY = (
    accelerate,
    pyarrow.parquet,
    huggingface_hub.HfApi,
    transformers.AutoModelForCausalLM,
    transformers.AutoTokenizer,
    transformers.LlamaForCausalLM,
)


def load(**asked: Any) -> Found:
    """One row a prompt: ``layer_<n>``, and ``labels`` where there are any."""
    found = load_activations(show_progress=False, **asked)
    acts, labels = found if isinstance(found, tuple) else (found, None)
    return {f"layer_{layer}": rows for layer, rows in acts.items()} | ({} if labels is None else {"labels": labels})


def load_tensors(**asked: Any) -> Found:
    """The tensors as they lie, and ``info``."""
    tensors, info = load_activation_dataset(**asked)
    return {name: _array(tensor) for name, tensor in tensors.items()} | {"info": info}


def describe(repo_id: str) -> Found:
    """What the metadata says."""
    about = fetch_dataset_metadata(repo_id)
    names = ("model_name", "available_layers", "num_prompts", "format_version", "tensor_descriptors", "prompts")
    return {name: getattr(about, name) for name in names}


def pull_and_read(
    repo_id: str, model: str, prompts: list[str], options: Mapping[str, Any], materialize: bool, **asked: Any
) -> Found:
    """Rows and logits out of the library's own cache after a pull; it serves no perplexity that was pulled."""
    pulled = pull_dataset(repo_id, materialize=materialize, **asked)
    unified = lmprobe.UnifiedCache(model, device="cpu", compute_perplexity=False, **options)
    found: Found = {"pulled": pulled, "acts": _array(unified.get_activations(prompts)[0])}
    if options.get("cache_logits"):
        logits = unified.get_logits(prompts)
        found |= {"logits": logits.values.numpy(), "ids": logits.indices.numpy()}
    return found


def push_rows(rows: str, model: str, prompts: list[str], pooling: str | None, push: Mapping[str, Any]) -> Found:
    """Publish given rows through the library's own cache.

    ``rows`` is an .npz: ``<prompt>/hidden`` [layers, tokens or 1, width], and where there are any ``<prompt>/logits``
    and ``<prompt>/ids`` [k], ``<prompt>/perplexity`` [3], ``<prompt>/token_perplexity`` [tokens - 1] and
    ``<prompt>/token_ids`` [tokens].
    """
    with np.load(rows) as given:
        for number, prompt in enumerate(prompts):
            own = {name: torch.from_numpy(given[f"{number}/{name}"]) for name in _of(given.files, number)}
            _keep(model, prompt, given["layers"].tolist(), pooling, own)
    return {"url": push_dataset(model_name=model, prompts=prompts, **push)}


def extract_and_push(model: str, prompts: list[str], options: Mapping[str, Any], push: Mapping[str, Any]) -> Found:
    """Run the model as the library does and publish what it kept of it."""
    unified = lmprobe.UnifiedCache(model, device="cpu", **options)
    unified.warmup(prompts)
    logits = unified.get_logits(prompts)
    return {
        "url": push_dataset(model_name=model, prompts=prompts, **push),
        "acts": unified.get_activations(prompts)[0].numpy(),
        "perplexity": unified.get_perplexity(prompts),
        "logits": logits.values.numpy(),
        "ids": logits.indices.numpy(),
    }


def upgrade(repo_id: str) -> Found:
    """Bring a dataset of format 1 to 2."""
    return {"url": upgrade_dataset_format(repo_id)}


def _array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    # bfloat16 is handed out as it is stored, and numpy has none.
    return (tensor.float() if tensor.is_floating_point() else tensor).numpy()


def _of(names: list[str], number: int) -> list[str]:
    return [name.split("/")[1] for name in names if name.startswith(f"{number}/")]


def _keep(model: str, prompt: str, layers: list[int], pooling: str | None, own: Mapping[str, torch.Tensor]) -> None:
    joined = torch.cat(list(own["hidden"]), dim=-1)[None]
    if pooling is None:
        cache.save_prompt_activations(model, prompt, layers, joined, torch.ones(1, joined.shape[1], dtype=torch.long))
    else:
        cache.save_prompt_pooled_activations(model, prompt, layers, joined[:, 0], pooling)
    if "logits" in own:
        values, ids = own["logits"][None, None], own["ids"][None, None]
        cache.save_prompt_topk_logits(model, prompt, values, ids, torch.ones(1, 1, dtype=torch.long))
    if "perplexity" in own:
        cache.save_prompt_perplexity(model, prompt, own["perplexity"], own["token_perplexity"], own["token_ids"])


JOBS: dict[str, Callable[..., Found]] = {
    job.__name__: job for job in (load, load_tensors, describe, pull_and_read, push_rows, extract_and_push, upgrade)
}


def _arrays(found: Found) -> dict[str, np.ndarray[Any, Any]]:
    """Arrays as they are; anything else as JSON, under a name that says so."""
    arrays = {name: value for name, value in found.items() if isinstance(value, np.ndarray)}
    return arrays | {f"json:{name}": np.array(json.dumps(found[name])) for name in found.keys() - arrays.keys()}


def _run(line: str) -> str:
    """The job's traceback, empty when it went well."""
    asked = json.loads(line)
    os.environ["LMPROBE_CACHE_DIR"] = asked["cache"]
    try:
        np.savez(asked["out"], **_arrays(JOBS[asked["do"]](**asked["with"])))
    except Exception:
        return traceback.format_exc()
    return ""


def _answer(line: str, answers: TextIO) -> None:
    child = os.fork()
    if child == 0:
        said = _run(line)
        answers.write((json.dumps(said) if said else "") + "\n")
        answers.flush()
        # What runs at exit belongs to the parent.
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status:
        answers.write(json.dumps(f"the job ended with status {status}") + "\n")
        answers.flush()


def main() -> None:
    """Take jobs until there are no more; what the library prints goes to the log."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answers.write(lmprobe.__version__ + "\n")
    answers.flush()
    for line in sys.stdin:
        _answer(line, answers)


if __name__ == "__main__":
    main()
