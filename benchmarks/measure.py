"""Timing: paired runs in one process, child processes, and the table that both end in."""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Row:
    """One line of the table: what was measured, the value, and what it must reach."""

    what: str
    value: float
    required: float
    better: str
    unit: str
    detail: str = ""

    @property
    def reached(self) -> bool:
        """Whether the value is on the right side of what is required."""
        return self.value >= self.required if self.better == "more" else self.value <= self.required


def paired_ratio(floor: Callable[[], Any], ours: Callable[[], Any], repeats: int) -> tuple[float, list[float]]:
    """Median of (seconds of ``floor``) / (seconds of ``ours``), and each.

    They run in turn, floor first and last, and each run of ours is held against the mean of the two
    around it, so that a machine that grows slower or faster meanwhile does not show.
    """
    floors, times = [seconds(floor)], []
    for _ in range(repeats):
        times.append(seconds(ours))
        floors.append(seconds(floor))
    ratios = [(floors[i] + floors[i + 1]) / 2 / mine for i, mine in enumerate(times)]
    return statistics.median(ratios), ratios


def seconds(work: Callable[[], Any]) -> float:
    """Wall seconds of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def child(python: str | Path, script: Path, arguments: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """Run ``script`` as a process of its own; its last line of output is JSON. Adds its CPU seconds and peak bytes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [str(python), str(script), json.dumps(dict(arguments))],
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    found["process_cpu_seconds"] = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return found


def report(rows: Sequence[Row], json_path: Path | None) -> int:
    """Print the table, write JSON, and give the exit status: 0 if every value was reached."""
    width = max(len(row.what) for row in rows)
    print(f"\n{'what':<{width}}  {'measured':>10}  {'required':>10}")
    for row in rows:
        sign = ">=" if row.better == "more" else "<="
        mark = "" if row.reached else "  NOT REACHED"
        print(
            f"{row.what:<{width}}  {row.value:>8.2f} {row.unit:<2} {sign} {row.required:>5.2f} {row.unit:<2}{mark}"
            + (f"   {row.detail}" if row.detail else "")
        )
    if json_path is not None:
        about = {"python": sys.version.split()[0], "machine": platform.processor() or platform.machine()}
        about["cores"] = str(os.cpu_count())
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps({"about": about, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    return 0 if all(row.reached for row in rows) else 1
