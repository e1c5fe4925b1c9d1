"""One job of ``lmprobe`` in its own environment: ``python benchmarks/lmprobe_job.py JSON``; prints JSON.

Needs nothing of ours. With ``fill`` it only writes synthetic rows under its own keys, so that a
large cache need not be computed.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

arguments = json.loads(sys.argv[1])
prompts = json.loads(Path(arguments["prompts"]).read_text())


def fill() -> dict[str, float]:
    import torch
    from lmprobe import cache

    rows = {cache._pooled_layer_key("last_token", layer): torch.zeros(8) for layer in range(30)}
    cache._register_model(arguments["model"])
    for prompt in prompts:
        cache._save_tensors_to_backend(cache._prompt_cache_key(arguments["model"], prompt), rows)
    return {"filled": len(prompts)}


def run() -> dict[str, float]:
    from lmprobe import UnifiedCache

    unified = UnifiedCache(model=arguments["model"], compute_perplexity=False, device="cpu", **arguments["options"])
    if arguments["load_first"]:
        unified.warmup(["One prompt, so that the model is loaded before the clock starts."])
    wall, cpu = time.perf_counter(), time.process_time()
    stats = unified.warmup(prompts)
    return {
        "wall_seconds": time.perf_counter() - wall,
        "cpu_seconds": time.process_time() - cpu,
        "extracted": stats.activations_extracted,
    }


print(json.dumps(fill() if arguments.get("fill") else run()))
