"""One job of ours in a process of its own: ``python benchmarks/our_job.py JSON``; prints JSON."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from peak_memory import peak_bytes

arguments = json.loads(sys.argv[1])
prompts = json.loads(Path(arguments["prompts"]).read_text())

from streamtap import UnifiedCache  # noqa: E402 - the import is part of what is measured

cache = UnifiedCache(model="demo", compute_perplexity=False, progress=False, **arguments["options"])
if arguments["load_first"]:
    cache.source.engine()
wall, cpu = time.perf_counter(), time.process_time()
stats = cache.warmup(prompts)
print(
    json.dumps(
        {
            "wall_seconds": time.perf_counter() - wall,
            "cpu_seconds": time.process_time() - cpu,
            "extracted": stats.activations_extracted,
            "torch_imported": "torch" in sys.modules,
            "peak_bytes": peak_bytes(),
        }
    )
)
