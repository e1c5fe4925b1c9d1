"""The plain model, or one engine beside it, in a process of its own: ``python benchmarks/parity_job.py JSON``.

``step`` is ``reference``, which makes the prompts and the plain float32 model's rows of them, or an engine's name. What
was found is written to ``STEP.json`` in ``folder``: engines and what they start print whatever they like.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: Prompts that run before the clock starts, so that what happens once is over.
WARM_UP = 4
LIBRARIES = ("torch", "transformers", "nnsight", "vllm", "vllm-lens")
GROUPS = 3


def reference(folder: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """Make prompts, and run them one at a time, unpadded, through the model and nothing else."""
    from workload import ragged

    from streamtap import TransformersEngine
    from streamtap.testing.reference import plain_rows

    engine = TransformersEngine.load(asked["model"], dtype="float32", device="cpu")
    tokenizer = engine.tokenizer.tokenizer
    prompts = ragged(tokenizer, asked["prompts"], longest=asked["longest"])
    ids = tokenizer(prompts)["input_ids"]
    (folder / "prompts.json").write_text(json.dumps(prompts))
    shape = (sum(map(len, ids)), engine.n_layers, engine.hidden)
    rows = np.lib.format.open_memmap(folder / "rows.npy", mode="w+", dtype=np.float32, shape=shape)
    begun, at = time.perf_counter(), 0
    for each in ids:
        for layer, values in plain_rows(engine.model, each).items():
            rows[at : at + len(each), layer] = values.numpy()
        at += len(each)
    seconds = time.perf_counter() - begun
    rows.flush()
    np.save(folder / "token_ids.npy", np.concatenate(ids).astype(np.int32))
    lengths = [len(each) for each in ids]
    return {
        "tokens": sum(lengths),
        "prompts": len(ids),
        "shortest": min(lengths),
        "longest": max(lengths),
        "seconds": seconds,
    }


def compared(folder: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """Every token's row of every layer from one engine, timed, and how far it is from the plain model's."""
    from streamtap import CaptureSpec, load_engine

    prompts = json.loads((folder / "prompts.json").read_text())
    engine = load_engine(asked["model"], backend=asked["backend"], **asked["options"])
    spec = CaptureSpec(layers="all")
    for _ in engine.capture(prompts[:WARM_UP], spec):
        pass
    begun = time.perf_counter()
    parts = list(engine.capture(prompts, spec))
    seconds = time.perf_counter() - begun
    about = engine.provenance
    engine.close()
    wanted = np.load(folder / "token_ids.npy")
    if not np.array_equal(np.concatenate([part.token_ids for part in parts]), wanted):
        raise SystemExit(f"{asked['step']}: the engine ran other tokens than the plain model.")
    return {
        "groups": grouped(distances(parts, np.load(folder / "rows.npy", mmap_mode="r"))),
        "tokens_per_second": len(wanted) / seconds,
        "seconds": seconds,
        "dtype": about.dtype,
        "engine": about.engine,
        "engine_version": about.engine_version,
    }


def distances(parts: Sequence[Any], plain: NDArray[np.float32]) -> NDArray[np.float64]:
    """Cosine and relative error of every row, float64 [2, layers, tokens]."""
    found, at = np.empty((2, plain.shape[1], plain.shape[0])), 0
    for part in parts:
        tokens = len(part.token_ids)
        for layer, rows in part.acts.items():
            ours, theirs = rows.astype(np.float64), plain[at : at + tokens, layer].astype(np.float64)
            norms = np.linalg.norm(ours, axis=1), np.linalg.norm(theirs, axis=1)
            found[0, layer, at : at + tokens] = (ours * theirs).sum(axis=1) / (norms[0] * norms[1])
            found[1, layer, at : at + tokens] = np.linalg.norm(ours - theirs, axis=1) / norms[1]
        at += tokens
    return found


def grouped(found: NDArray[np.float64]) -> list[dict[str, Any]]:
    """The worst of each third of the layers, and the median error beside it."""
    groups = []
    for layers in np.array_split(np.arange(found.shape[1]), GROUPS):
        cosine, relative = found[:, layers]
        groups.append(
            {
                "layers": [int(layers[0]), int(layers[-1])],
                "worst_cosine": float(cosine.min()),
                "worst_relative_error": float(relative.max()),
                "median_relative_error": float(np.median(relative)),
            }
        )
    return groups


def versions() -> dict[str, str]:
    """Of the libraries that this process may have run a model with."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def main() -> None:
    """Do one step."""
    asked = json.loads(sys.argv[1])
    folder = Path(asked["folder"])
    found = (reference if asked["step"] == "reference" else compared)(folder, asked)
    (folder / f"{asked['step']}.json").write_text(json.dumps({**found, "versions": versions()}))


# Not at import: vLLM's workers import this file anew.
if __name__ == "__main__":
    main()
