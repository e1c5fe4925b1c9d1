"""Three layers of every token by nnsight in its own environment: ``python benchmarks/harvest_nnsight_job.py JSON``.

Needs nothing of ours. The same texts and model, in length-sorted batches, each written as one safetensors file in
bfloat16; the model is loaded, and one batch traced, before the clock starts. Prints JSON.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from nnsight import LanguageModel
from safetensors.torch import save_file

BUDGET_TOKENS = 512
arguments = json.loads(sys.argv[1])
torch.set_num_threads(arguments["threads"])
torch.set_grad_enabled(False)


def batches(tokenizer: Any) -> list[list[list[int]]]:
    """Token ids, longest first, of at most BUDGET_TOKENS a batch with its padding."""
    texts = json.loads(Path(arguments["prompts"]).read_text())
    found: list[list[list[int]]] = [[]]
    for ids in sorted(tokenizer(texts)["input_ids"], key=len, reverse=True):
        if found[-1] and (len(found[-1]) + 1) * len(found[-1][0]) > BUDGET_TOKENS:
            found.append([])
        found[-1].append(ids)
    return found


def trace(model: Any, batch: list[list[int]]) -> list[torch.Tensor]:
    """What the blocks put out, each [prompts, tokens, hidden], padded on the right."""
    width = len(batch[0])
    ids = torch.tensor([each + [0] * (width - len(each)) for each in batch])
    mask = torch.tensor([[1] * len(each) + [0] * (width - len(each)) for each in batch])
    saved: list[Any] = []
    with model.trace({"input_ids": ids, "attention_mask": mask}) as tracer:
        for layer in arguments["layers"]:
            saved.append(model.model.layers[layer].output.save())
        tracer.stop()
    return [each[0] if isinstance(each, tuple) else each for each in saved]


def run() -> dict[str, float]:
    """Trace and write every batch."""
    model = LanguageModel(arguments["model"], device_map="cpu", dtype=torch.float32, dispatch=True)
    out = Path(arguments["out"])
    out.mkdir()
    all_of_them = batches(model.tokenizer)
    trace(model, all_of_them[-1])
    wall, cpu, tokens = time.perf_counter(), time.process_time(), 0
    for number, batch in enumerate(all_of_them):
        layers = trace(model, batch)
        rows = {
            f"prompt_{i}": torch.stack([layer[i, : len(ids)] for layer in layers]).to(torch.bfloat16)
            for i, ids in enumerate(batch)
        }
        save_file(rows, out / f"batch_{number}.safetensors")
        tokens += sum(map(len, batch))
    return {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu, "tokens": tokens}


with contextlib.redirect_stdout(sys.stderr):
    found = run()
print(json.dumps({**found, "version": version("nnsight")}))
