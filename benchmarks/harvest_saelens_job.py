"""One cached layer by SAELens in its own environment: ``python benchmarks/harvest_saelens_job.py JSON``; prints JSON.

Needs nothing of ours but a file beside it. Its runner gets the same texts and model; the model is loaded before the
clock starts.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch
from datasets import Dataset
from peak_memory import peak_bytes
from sae_lens import CacheActivationsRunner, CacheActivationsRunnerConfig

HIDDEN = 576
arguments = json.loads(sys.argv[1])
torch.set_num_threads(arguments["threads"])
torch.set_grad_enabled(False)


def texts() -> Dataset:
    """As many copies of the texts as the tokens take."""
    found = json.loads(Path(arguments["prompts"]).read_text())
    return Dataset.from_list([{"text": text} for text in found] * (1 + arguments["tokens"] // (50 * len(found))))


def run() -> dict[str, float]:
    """Cache the layer."""
    config = CacheActivationsRunnerConfig(
        dataset_path="in memory",
        model_name=arguments["model"],
        model_class_name="AutoModelForCausalLM",
        hook_name=f"model.layers.{arguments['layer']}",
        d_in=HIDDEN,
        # Whole buffers are filled, whatever is left of the tokens: two of them, and a row for rounding.
        buffer_size_gb=(arguments["tokens"] / 2 + 1) * HIDDEN * 4 / 1e9,
        training_tokens=arguments["tokens"],
        context_size=arguments["context"],
        model_batch_size=arguments["batch"],
        new_cached_activations_path=arguments["out"],
        dtype="float32",
        device="cpu",
        shuffle=False,
        streaming=False,
        prepend_bos=True,
        autocast_lm=False,
    )
    runner = CacheActivationsRunner(config, override_dataset=texts())
    wall, cpu = time.perf_counter(), time.process_time()
    rows = runner.run()
    return {
        "seconds": time.perf_counter() - wall,
        "cpu_seconds": time.process_time() - cpu,
        "tokens": len(rows) * arguments["context"],
        "peak_bytes": peak_bytes(),
    }


with contextlib.redirect_stdout(sys.stderr):
    found = run()
print(json.dumps({**found, "version": version("sae-lens")}))
