"""``lmprobe`` packs and loads rows like ours: ``python benchmarks/dataset_lmprobe_job.py JSON``; prints JSON.

Runs in an environment of its own with nothing of ours, against the Hub that HF_ENDPOINT names. Its cache is filled
with synthetic rows under its own keys, so that a large one need not be computed.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time

import numpy as np
import torch
from lmprobe import cache
from lmprobe.sharing import load_activations, push_dataset

arguments = json.loads(sys.argv[1])
MODEL, REPO = "bench/model", "tester/theirs"
LAYERS, HIDDEN = arguments["layers"], arguments["hidden"]
prompts = [f"statement number {number} says that {number * 7} is a multiple" for number in range(arguments["prompts"])]


def fill() -> None:
    rng = np.random.default_rng(0)
    layers = list(range(LAYERS))
    for prompt in prompts:
        row = torch.from_numpy(rng.standard_normal((1, LAYERS * HIDDEN), np.float32))
        cache.save_prompt_pooled_activations(MODEL, prompt, layers, row, "last_token")


def pack() -> dict[str, float]:
    labels = [number % 2 for number in range(len(prompts))]
    cpu, wall = time.process_time(), time.perf_counter()
    push_dataset(REPO, MODEL, prompts, labels=labels, stream=True)
    return {"pack_cpu_seconds": time.process_time() - cpu, "pack_seconds": time.perf_counter() - wall}


def load() -> dict[str, float]:
    layer = LAYERS // 2
    load_activations(REPO, layers=[layer], show_progress=False)  # downloads
    cpu, wall = time.process_time(), time.perf_counter()
    rows = load_activations(REPO, layers=[layer], show_progress=False)[layer]
    assert rows.shape == (len(prompts), HIDDEN)
    return {"load_cpu_seconds": time.process_time() - cpu, "load_seconds": time.perf_counter() - wall}


with contextlib.redirect_stdout(sys.stderr):
    fill()
    found = pack() | load()
print(json.dumps(found))
