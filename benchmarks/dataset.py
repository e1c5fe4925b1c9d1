"""Datasets at full size: packing pooled rows of many prompts at every layer, and loading one layer.

    python benchmarks/dataset.py [--prompts 20000 --layers 30 --hidden 576] [--lmprobe PYTHON] [--json OUT]

Each figure is a ratio within one run: packing to the disk's own sequential write, loading to safetensors alone on
the same file, both beside ``lmprobe`` where its interpreter is named, which packs and loads rows like them. Writes to a
temporary folder (about 8 GB at the default sizes) and removes it. Each step is a process of its own.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import Row, child, report

from streamtap.testing import HubServer

HERE = Path(__file__).resolve().parent
OURS = HERE / "dataset_job.py"
THEIRS = HERE / "dataset_lmprobe_job.py"


def main() -> int:
    """Measure, print a table, write JSON where asked."""
    parser = argparse.ArgumentParser(description="Measure packing and loading of datasets.")
    parser.add_argument("--prompts", type=int, default=20_000)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--lmprobe", type=Path, help="python of an environment with lmprobe")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="streamtap-bench-") as name:
        rows = measure(Path(name), args)
    return report(rows, args.json)


def measure(folder: Path, args: argparse.Namespace) -> list[Row]:
    """Fill a cache, pack it, load a layer; then two sizes of fewer layers, for how memory grows."""
    sizes = {"layers": args.layers, "hidden": args.hidden}
    whole = folder / "whole"
    _run(whole, "fill", prompts=args.prompts, **sizes)
    packs = [_run(whole, "pack", prompts=args.prompts, **sizes) for _ in range(args.repeats)]
    best = max(packs, key=lambda found: found["disk_seconds"] / found["seconds"])
    loads = [_run(whole, "load", prompts=args.prompts, **sizes) for _ in range(args.repeats)]
    quick = min(loads, key=lambda found: found["seconds"] / found["safetensors_seconds"])
    rows = [
        Row("packing / sequential write", best["disk_seconds"] / best["seconds"], 0.5, "more", "x", _speeds(packs)),
        Row("peak memory of packing", max(found["peak_bytes"] for found in packs) / 1e6, 500, "less", "MB"),
        _growth(folder, args),
        Row("one layer / safetensors", quick["seconds"] / quick["safetensors_seconds"], 2, "less", "x", _times(loads)),
    ]
    return rows + (_beside_lmprobe(whole, args, best, quick) if args.lmprobe else [])


def _growth(folder: Path, args: argparse.Namespace) -> Row:
    """Peak memory of packing three times as many prompts; both have more than fit into one block of rows."""
    peaks = []
    for times in (2, 6):
        asked = {"prompts": args.prompts * times, "layers": 2, "hidden": args.hidden}
        place = folder / f"times-{times}"
        _run(place, "fill", **asked)
        peaks.append(_run(place, "pack", **asked)["peak_bytes"])
        shutil.rmtree(place)
    detail = f"{peaks[0] / 1e6:.0f} and {peaks[1] / 1e6:.0f} MB for {2 * args.prompts} and {6 * args.prompts} prompts"
    return Row("peak memory / a third of the prompts", peaks[1] / peaks[0], 1.25, "less", "x", detail)


def _beside_lmprobe(folder: Path, args: argparse.Namespace, pack: dict[str, Any], load: dict[str, Any]) -> list[Row]:
    asked = {"prompts": args.prompts, "layers": args.layers, "hidden": args.hidden}
    with HubServer(folder / "hub") as hub:
        places = {"HF_HOME": str(folder / "hf"), "LMPROBE_CACHE_DIR": str(folder / "lmprobe")}
        theirs = child(args.lmprobe, THEIRS, asked, hub.environment | places)
    pack_ratio, load_ratio = (
        theirs["pack_cpu_seconds"] / pack["cpu_seconds"],
        theirs["load_cpu_seconds"] / load["cpu_seconds"],
    )
    return [
        Row("lmprobe / packing, CPU", pack_ratio, 20, "more", "x", f"{theirs['pack_cpu_seconds']:.1f} s"),
        Row("lmprobe / loading a layer, CPU", load_ratio, 50, "more", "x", f"{theirs['load_cpu_seconds']:.2f} s"),
    ]


def _run(folder: Path, step: str, **asked: int) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    cache = {"STREAMTAP_CACHE_DIR": str(folder / "cache")}
    return child(sys.executable, OURS, {"step": step, "folder": str(folder), **asked}, cache)


def _speeds(packs: list[dict[str, Any]]) -> str:
    mb = packs[0]["bytes"] / 1e6
    each = ", ".join(f"{mb / found['seconds']:.0f}/{mb / found['disk_seconds']:.0f}" for found in packs)
    return f"{each} MB/s, {min(found['cpu_seconds'] for found in packs):.1f} CPU s"


def _times(loads: list[dict[str, Any]]) -> str:
    each = ", ".join(f"{1e3 * found['seconds']:.0f}/{1e3 * found['safetensors_seconds']:.0f}" for found in loads)
    return f"{each} ms"


if __name__ == "__main__":
    sys.exit(main())
