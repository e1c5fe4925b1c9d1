"""One harvest of ours in a process of its own: ``python benchmarks/harvest_job.py JSON``; prints JSON.

``step`` is ``run`` (prompts of a file), ``windows`` (packed windows of them) or ``count`` (so many short prompts from a
generator). With ``waits`` it says ``ready`` once the model is loaded, and starts at the next line of its input.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import cycle
from pathlib import Path

arguments = json.loads(sys.argv[1])
os.environ["OMP_NUM_THREADS"] = str(arguments["threads"])

from harvest_work import harvest_tokenised  # noqa: E402 - the number of threads is read on import
from peak_memory import peak_bytes  # noqa: E402

from streamtap import TransformersEngine  # noqa: E402
from streamtap.harvest.plan import Tokenised, read_prompts  # noqa: E402


def prompts(engine: TransformersEngine) -> Iterable[Tokenised]:
    """What runs, as it is asked for."""
    if arguments["step"] == "count":
        return read_prompts(_counted(arguments["count"]), engine.tokenizer)
    texts = json.loads(Path(arguments["prompts"]).read_text())
    if arguments["step"] == "run":
        return read_prompts(texts, engine.tokenizer)
    from streamtap.harvest.windows import windows

    return windows(
        cycle(texts), engine.tokenizer, context=arguments["context"], pack=True, max_tokens=arguments["tokens"]
    )


def _counted(count: int) -> Iterator[str]:
    for number in range(count):
        yield f"Number {number} of many is {number * 7}."


def run() -> dict[str, float]:
    """Load, harvest, and say what it took."""
    engine = TransformersEngine.load("demo", dtype="float32", device="cpu")
    list(engine.capture(["One prompt, so that what is checked once is over."], _spec()))
    if arguments.get("waits"):
        print("ready", file=sys.__stdout__, flush=True)
        sys.stdin.readline()
    layers = arguments.get("layers") or [arguments["layer"]]
    wall, cpu = time.perf_counter(), time.process_time()
    manifest = harvest_tokenised(
        engine,
        prompts(engine),
        arguments["out"],
        Path(arguments["out"] + "-spool"),
        layers,
        arguments.get("shard_size", 32),
    )
    found = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
    found["tokens"] = sum(
        tensor.shape[0] for shard in manifest.shards for tensor in shard.tensors if tensor.name.startswith("tokens_")
    )
    return {**found, "peak_bytes": peak_bytes()}


def _spec() -> object:
    from streamtap import CaptureSpec

    return CaptureSpec(layers="all")


with contextlib.redirect_stdout(sys.stderr):
    found = run()
print(json.dumps(found))
