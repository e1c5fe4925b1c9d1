"""One step of ``dataset.py`` in a process of its own: fill a cache, pack it, or load a layer; prints JSON."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from peak_memory import peak_bytes

from streamtap import load_activations, push_dataset
from streamtap.activations import Provenance
from streamtap.cache import CacheStore, PromptKey
from streamtap.fingerprint import tokens_digest
from streamtap.settings import Settings
from streamtap.spec import CaptureSpec, Prompt
from streamtap.workbench.known_model import KnownModel
from streamtap.workbench.prompt_keys import PromptKeys
from streamtap.workbench.wanted import layer_channel, layer_name, row_identity

MODEL = "bench/model"
BATCH = 512
BLOCK_BYTES = 16 << 20


def texts(prompts: int) -> list[str]:
    """One short statement a prompt."""
    return [
        f"statement number {number} says that {number * 7} is a multiple of {number % 13 + 2}"
        for number in range(prompts)
    ]


def fill(prompts: int, layers: int, hidden: int) -> dict[str, Any]:
    """Put rows of every prompt and layer into the cache, as an extraction would."""
    provenance = Provenance(MODEL, "0" * 40, "bench", "float32", n_layers=layers, hidden=hidden)
    limits = {"context_length": 1024, "vocabulary": 50_000, "special_ids": []}
    spec = CaptureSpec(layers=(), pooling="last_token")
    rng = np.random.default_rng(0)
    with CacheStore(Settings.from_environment().activations_dir) as store:
        set_id = store.ensure_set(row_identity(provenance, spec), asdict(provenance))
        finder = PromptKeys(store, KnownModel(provenance, limits), spec)
        named = texts(prompts)
        with store.writer(set_id, [layer_channel(layer, provenance) for layer in range(layers)]) as writer:
            for start in range(0, prompts, BATCH):
                some = named[start : start + BATCH]
                ids = [rng.integers(0, 50_000, 18, np.int32) for _ in some]
                keys = [PromptKey(tokens_digest(each), each) for each in ids]
                finder.remember([Prompt(text=text) for text in some], keys)
                block = rng.standard_normal((len(some), hidden), np.float32)
                rows = {layer_name(layer): block + np.float32(layer) for layer in range(layers)}
                last = np.array([each[-1] for each in ids], np.int32)
                writer.append(keys, rows, np.arange(len(some) + 1), last, np.full(len(some), 17, np.int32))
    return {"rows": prompts * layers}


def pack(folder: Path, prompts: int, layers: int, hidden: int) -> dict[str, Any]:
    """Publish to a local folder, between two sequential writes of as many bytes."""
    target = folder / "dataset"
    shutil.rmtree(target, ignore_errors=True)
    size = prompts * layers * hidden * 4
    before = _sequential_write(folder / "plain", size)
    named = texts(prompts)
    _import_what_pyarrow_imports()
    cpu, start = time.process_time(), time.perf_counter()
    push_dataset(target, MODEL, named, labels=[number % 2 for number in range(prompts)], progress=False)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    peak = peak_bytes()
    after = _sequential_write(folder / "plain", size)
    return {
        "seconds": seconds,
        "cpu_seconds": cpu,
        "disk_seconds": (before + after) / 2,
        "bytes": size,
        "peak_bytes": peak,
    }


def load(folder: Path, layers: int) -> dict[str, Any]:
    """Load one layer of the folder, and read its file with safetensors alone, in turn."""
    from safetensors.numpy import load_file

    layer = layers // 2
    file = folder / "dataset" / "tensors" / f"hidden_layer{layer:03d}_shard000.safetensors"
    target = folder / "dataset"
    load_activations(target, layers=[layer], show_progress=False)  # its hash is compared at the first load alone
    ours, theirs, cpu = [], [], []
    for _ in range(9):
        theirs.append(_seconds(lambda: load_file(file)))
        used = time.process_time()
        ours.append(_seconds(lambda: load_activations(target, layers=[layer], show_progress=False)))
        cpu.append(time.process_time() - used)
    return {
        "seconds": statistics.median(ours),
        "safetensors_seconds": statistics.median(theirs),
        "cpu_seconds": statistics.median(cpu),
    }


def _import_what_pyarrow_imports() -> None:
    # pyarrow looks for pandas at its first conversion, which takes as long as a layer where it is installed.
    with contextlib.suppress(ImportError):
        import pandas  # noqa: F401


def _sequential_write(path: Path, size: int) -> float:
    block = np.random.default_rng(1).bytes(BLOCK_BYTES)
    start = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(size // BLOCK_BYTES):
            file.write(block)
        os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    path.unlink()
    return seconds


def _seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    """Do the step that the argument names."""
    asked = json.loads(sys.argv[1])
    step, folder = asked.pop("step"), Path(asked.pop("folder"))
    if step == "fill":
        found = fill(**asked)
    elif step == "pack":
        found = pack(folder, **asked)
    else:
        found = load(folder, asked["layers"])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
