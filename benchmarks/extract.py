"""Extraction against its floor, the bare forward pass, and against ``lmprobe`` 0.10.3.

``python benchmarks/extract.py [--lmprobe PYTHON] [--only bare,lmprobe,warm,memory] [--repeats 2] [--json FILE]``

Every figure is a ratio of two things run in turn in one run. ``make bench`` makes the
environment that ``--lmprobe`` names.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from bare import BUDGETS, bare_batches, run_bare, shortened
from measure import Row, child, paired_ratio, report, seconds
from workload import ragged, short, with_preamble

from streamtap import TransformersEngine, UnifiedCache
from streamtap.cache import Channel
from streamtap.engines.demo_model import demo_folder
from streamtap.settings import Settings
from streamtap.spec import as_prompts
from streamtap.workbench.prompt_keys import PromptKeys
from streamtap.workbench.wanted import layer_name, row_identity

HERE = Path(__file__).parent
PARTS = ("bare", "lmprobe", "warm", "memory")


def main() -> int:
    """Run the parts asked for and print their table."""
    options = _options()
    engine = TransformersEngine.load("demo", dtype="float32", device="cpu")
    tokenizer = engine.tokenizer.tokenizer
    rows: list[Row] = []
    if "bare" in options.only:
        rows += against_bare(engine, options.repeats, options.match)
    if "lmprobe" in options.only:
        rows += against_lmprobe(tokenizer, options.lmprobe, options.repeats)
    if "warm" in options.only:
        rows += all_cached(tokenizer, options.lmprobe)
    if "memory" in options.only:
        rows += memory(tokenizer)
    return report(rows, options.json)


def against_bare(engine: TransformersEngine, repeats: int, match: str) -> list[Row]:
    """The jobs whose floor is the bare forward pass over the same prompts."""
    tokenizer, body = engine.tokenizer.tokenizer, engine.forward.blocks.body
    plain, shared = ragged(tokenizer), with_preamble(tokenizer)
    unpooled = {"layers": [15], "cache_pooled": False}
    cases: list[tuple[str, list[str], Any, dict[str, Any], float]] = [
        ("all layers, last token / bare", plain, body, {"layers": "all"}, 0.95),
        ("layers=[7] / bare, full depth", plain, body, {"layers": [7]}, 3.5),
        ("shared 120-token preamble / bare", shared, body, {"layers": "all"}, 4.0),
        ("layers=[15], unpooled / bare, 16 blocks", plain, shortened(body, 16), unpooled, 0.9),
    ]
    rows = []
    for what, prompts, floor_body, asked, required in cases:
        if match not in what:
            continue
        ids = tokenizer(prompts)["input_ids"]
        batches, budget = _fastest(floor_body, ids)

        def ours(prompts: list[str] = prompts, asked: dict[str, Any] = asked) -> None:
            with tempfile.TemporaryDirectory() as folder:
                cache = UnifiedCache(engine, compute_perplexity=False, cache_dir=folder, progress=False, **asked)
                assert cache.warmup(prompts).activations_extracted == len(prompts)
                cache.close()

        def floor(floor_body: Any = floor_body, batches: Any = batches) -> None:
            run_bare(floor_body, batches)

        ratio, each = paired_ratio(floor, ours, repeats)
        tokens = sum(map(len, ids))
        spread = f"{min(each):.2f} to {max(each):.2f}; {tokens} tokens; bare at {budget} tokens a batch"
        rows.append(Row(what, ratio, required, "more", "x", spread))
        print(f"{what}: {ratio:.2f} ({spread})", file=sys.stderr)
    return rows


def against_lmprobe(tokenizer: Any, python: Path | None, repeats: int) -> list[Row]:
    """The first and the fourth job, cold, each side in its own process with the model loaded."""
    jobs = {
        "first job (all layers, last token) / lmprobe": ({"layers": "all", "pooling": "last_token"}, 1.9),
        "fourth job (layer 15, unpooled) / lmprobe": ({"layers": [15], "cache_pooled": False}, 4.0),
    }
    rows = []
    with _scratch(ragged(tokenizer)) as (folder, prompts):
        for what, (asked, required) in jobs.items():
            wall, cpu = [], []
            for i in range(repeats):
                theirs = _lmprobe(python, prompts, asked, folder / f"theirs-{len(rows)}-{i}", load_first=True)
                mine = _ours(prompts, {**asked, "cache_dir": str(folder / f"ours-{len(rows)}-{i}")}, load_first=True)
                wall.append(theirs["wall_seconds"] / mine["wall_seconds"])
                cpu.append(theirs["cpu_seconds"] / mine["cpu_seconds"])
            detail = f"wall; CPU seconds {statistics.median(cpu):.2f} x"
            rows.append(Row(what, statistics.median(wall), required, "more", "x", detail))
    return rows


def all_cached(tokenizer: Any, python: Path | None) -> list[Row]:
    """The same prompts again in a new process, 200 and 20 000: only the caches are read."""
    with _scratch(ragged(tokenizer)) as (folder, prompts):
        store = str(folder / "ours")
        _ours(prompts, {"cache_dir": store}, load_first=False)
        again = _ours(prompts, {"cache_dir": store}, load_first=False)
    assert again["extracted"] == 0, again
    loaded = Row("model loaded when all is cached", float(again["torch_imported"]), 0.0, "less", "")
    with _scratch(short(20_000)) as (folder, prompts):
        _fill_ours(prompts, folder / "ours")
        ours, theirs = [], []
        _lmprobe(python, prompts, {}, folder / "theirs", load_first=False, fill=True)
        for _ in range(3):
            mine = _ours(prompts, {"cache_dir": str(folder / "ours")}, load_first=False)
            other = _lmprobe(python, prompts, {"layers": "all"}, folder / "theirs", load_first=False)
            assert mine["extracted"] == other["extracted"] == 0, (mine, other)
            assert not mine["torch_imported"]
            ours.append(mine["cpu_seconds"]), theirs.append(other["cpu_seconds"])
            whole = (other["process_cpu_seconds"], mine["process_cpu_seconds"])
    ratio = statistics.median(theirs) / statistics.median(ours)
    detail = f"warmup(): {statistics.median(ours):.2f} s of CPU; whole process {whole[0] / whole[1]:.1f} x"
    return [loaded, Row("20 000 prompts all cached / lmprobe, CPU", ratio, 4.0, "more", "x", detail)]


def memory(tokenizer: Any) -> list[Row]:
    """Peak memory of ten times the prompts."""
    peaks = []
    for count in (400, 4000):
        with _scratch(ragged(tokenizer, count, longest=16)) as (folder, prompts):
            done = _ours(prompts, {"cache_dir": str(folder / "ours"), "layers": "all"}, load_first=True)
        assert done["extracted"] == count
        peaks.append(done["peak_bytes"])
    detail = f"prompts of 8 to 16 tokens; {peaks[0] / 1e6:.0f} MB and {peaks[1] / 1e6:.0f} MB"
    return [Row("peak memory, 4 000 prompts / 400", peaks[1] / peaks[0], 1.1, "less", "x", detail)]


def _fastest(body: Any, ids: list[list[int]]) -> tuple[Any, int]:
    """The bare batches of the fastest budget, found on every fifth prompt."""
    some = ids[::5]
    run_bare(body, bare_batches(some[:4], BUDGETS[0]))
    timed = {budget: seconds(partial(run_bare, body, bare_batches(some, budget))) for budget in BUDGETS}
    budget = min(timed, key=timed.__getitem__)
    return bare_batches(ids, budget), budget


def _fill_ours(prompts: Path, folder: Path) -> None:
    """Synthetic rows of every layer under the demo model's own identity."""
    texts = json.loads(prompts.read_text())
    with UnifiedCache(model="demo", compute_perplexity=False, cache_dir=folder, progress=False) as cache:
        finder = PromptKeys(cache.store, cache.source, cache.spec)
        keyed = finder.find(as_prompts(texts))
        provenance, layers = cache.provenance, cache.layer_indices
        spec = cache.spec
        number = cache.store.ensure_set(row_identity(provenance, spec), vars(provenance))
        channels = [Channel(layer_name(layer), provenance.dtype, 8) for layer in layers]
        with cache.store.writer(number, channels) as writer:
            for start in range(0, len(texts), 1000):
                keys = finder.keys(keyed.rows[start : start + 1000], keyed.fresh)
                rows = {channel.name: np.zeros((len(keys), 8), np.float32) for channel in channels}
                last = np.array([key.token_ids[-1] for key in keys], np.int32)
                writer.append(keys, rows, np.arange(len(keys) + 1), last, np.zeros(len(keys), np.int32))


def _ours(prompts: Path, options: dict[str, Any], *, load_first: bool) -> dict[str, Any]:
    arguments = {"prompts": str(prompts), "options": options, "load_first": load_first}
    return child(sys.executable, HERE / "our_job.py", arguments, {})


def _lmprobe(
    python: Path | None, prompts: Path, options: dict[str, Any], folder: Path, *, load_first: bool, fill: bool = False
) -> dict[str, Any]:
    if python is None:
        raise SystemExit("this part compares with lmprobe: name its interpreter with --lmprobe (make bench does).")
    model = str(demo_folder(Settings.from_environment()))
    arguments = {"prompts": str(prompts), "model": model, "options": options, "load_first": load_first, "fill": fill}
    return child(python, HERE / "lmprobe_job.py", arguments, {"LMPROBE_CACHE_DIR": str(folder), "HF_HUB_OFFLINE": "1"})


@contextmanager
def _scratch(prompts: list[str]) -> Iterator[tuple[Path, Path]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "prompts.json"
        file.write_text(json.dumps(prompts))
        yield folder, file


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lmprobe", type=Path, help="Python of an environment with lmprobe==0.10.3")
    parser.add_argument("--only", type=lambda text: text.split(","), default=PARTS, help=f"any of {','.join(PARTS)}")
    parser.add_argument("--match", default="", help="only the rows of the bare part whose name holds this")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
