"""Many clients of a server, in a process of their own: captures of one token, or texts.

It reads a line of JSON for each job, ``{"prompts": [...], "threads": 16, "max_tokens": 1, "capture": true,
"binary": true}``, runs it, and answers with a line: ``{"seconds", "rows", "bytes", "tokens"}``.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from streamtap import Client


def main() -> int:
    """Run jobs until standard input ends."""
    with Client() as client:
        for line in sys.stdin:
            print(json.dumps(run(client, json.loads(line))), flush=True)
    return 0


def run(client: Client, job: dict[str, Any]) -> dict[str, Any]:
    """One job: every prompt once, ``threads`` at a time."""

    def one(prompt: str) -> tuple[int, int, int]:
        done = client.complete(
            prompt,
            max_tokens=job["max_tokens"],
            temperature=0,
            output_residual_stream=True if job["capture"] else None,
            binary=job.get("binary", False),
        )
        if done.activations is None:
            return 0, 0, done.usage.completion_tokens
        layers = done.activations.acts
        rows = len(done.activations.positions)
        assert rows == done.usage.total_tokens - 1, (rows, done.usage)
        return rows, sum(each.nbytes for each in layers.values()), done.usage.completion_tokens

    start = time.perf_counter()
    with ThreadPoolExecutor(job["threads"]) as pool:
        counts = list(pool.map(one, job["prompts"]))
    rows, size, tokens = (sum(each) for each in zip(*counts, strict=True))
    return {"seconds": time.perf_counter() - start, "rows": rows, "bytes": size, "tokens": tokens}


if __name__ == "__main__":
    sys.exit(main())
