"""Bulk harvest against its floors: the bare forward pass, one process, the disk, and what others do.

``python benchmarks/harvest.py [--only disk,store,service,cluster,memory,stream,saelens,nnsight] [--json FILE]``

Every figure is a ratio, or a difference, of things run in turn in one run. ``--saelens`` and ``--nnsight`` name the
interpreters of environments with those libraries (``make bench-harvest`` makes them); they get the same texts and the
same model, each in a process of its own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os

from streamtap.settings import BESIDE_OTHER_WORK

# As `streamtap harvest run` and the service's workers have it, for the bare pass too; read when torch is loaded.
os.environ.update({name: os.environ.get(name, value) for name, value in BESIDE_OTHER_WORK.items()})

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
from bare import BUDGETS, bare_batches, run_bare
from cold_files import forget, read_through
from harvest_work import SHARD_PROMPTS, fake_harvest, harvest, tokens_per_second_on_a_cluster
from measure import Row, child, paired_ratio, report, seconds
from object_store import object_store
from served import Served, served
from workload import ragged

from streamtap import TransformersEngine
from streamtap.engines.demo_model import demo_folder
from streamtap.settings import Settings

HERE = Path(__file__).parent
PARTS = ("disk", "store", "service", "cluster", "memory", "stream", "saelens", "nnsight")
#: A third, two thirds and the last of 30 blocks: the pass is as deep as the bare one.
LAYERS = [9, 19, 29]
LAYER = 15
DEMO = '[[models]]\nid = "demo"\ncheckpoint = "demo"\ndtype = "float32"\nidle_seconds = 0\n'
CONTEXT, WINDOW_BATCH = 128, 16
SHUFFLE_ROWS = 1 << 17


def main() -> int:
    """Run the parts asked for and print their table."""
    options = _options()
    parts: dict[str, Callable[[argparse.Namespace], list[Row]]] = {
        "disk": to_disk,
        "store": to_store,
        "service": small_job,
        "cluster": two_actors,
        "memory": memory,
        "stream": stream,
        "saelens": beside_saelens,
        "nnsight": beside_nnsight,
    }
    rows = []
    for name in options.only:
        rows += parts[name](options)
        _tell(f"{name}: {rows[-1].value:.3f} {rows[-1].detail}")
    return report(rows, options.json)


def to_disk(options: argparse.Namespace) -> list[Row]:
    """Three layers, every token's row, into files that are durable when the call returns."""
    with _scratch() as folder:
        return [_against_bare("three layers to disk / bare, tokens/s", str(folder / "run-{}"), 0.93, folder, options)]


def to_store(options: argparse.Namespace) -> list[Row]:
    """The same into a real S3 server on this machine, which shares its cores with the model."""
    with _scratch() as folder, object_store(folder / "s3") as url:
        return [_against_bare("three layers to local S3 / bare, tokens/s", url + "/run-{}", 0.9, folder, options)]


def _against_bare(what: str, place: str, required: float, folder: Path, options: argparse.Namespace) -> Row:
    engine = _engine()
    tokenizer, body = engine.tokenizer.tokenizer, engine.forward.blocks.body
    prompts = ragged(tokenizer, options.prompts)
    ids = tokenizer(prompts)["input_ids"]
    batches, budget = _fastest(body, ids)
    numbers = itertools.count()

    def ours() -> None:
        number = next(numbers)
        manifest = harvest(engine, prompts, place.format(number), folder / f"spool-{number}", layers=LAYERS)
        assert manifest.n_prompts == len(prompts)

    ratio, each = paired_ratio(lambda: run_bare(body, batches), ours, options.repeats)
    spread = f"{min(each):.2f} to {max(each):.2f}; {sum(map(len, ids))} tokens; bare at {budget} tokens a batch"
    return Row(what, ratio, required, "more", "x", spread)


def small_job(options: argparse.Namespace) -> list[Row]:
    """Eight prompts over HTTP, from the request to the answer that says done, but for the harvest itself."""
    prompts = ragged(_engine().tokenizer.tokenizer, 8, longest=32)
    with _scratch() as folder, served(DEMO, folder) as server, httpx2.Client(timeout=120) as http:
        cold, _ = _job(http, server, prompts)
        warm = [_job(http, server, prompts) for _ in range(max(5, options.repeats))]
    over = statistics.median(whole - work for whole, work in warm)
    wholes = [whole for whole, _ in warm]
    detail = f"{min(wholes):.2f} to {max(wholes):.2f} s in all; {cold:.1f} s with a cold engine"
    return [Row("small job over HTTP, but for its harvest", over, 5.0, "less", "s", detail)]


def _job(http: httpx2.Client, server: Served, prompts: list[str]) -> tuple[float, float]:
    """Seconds until a job is known to be done, and of these what its worker harvested."""
    headers = {"Authorization": f"Bearer {server.key}"}
    body = {"model": "demo", "prompts": prompts, "layers": LAYERS}
    begun = time.perf_counter()
    answer = http.post(f"{server.base}/harvest", json=body, headers=headers)
    assert answer.status_code == 202, answer.text
    place = f"{server.base}/harvest/{answer.json()['job_id']}"
    while (job := http.get(place, params={"wait": 60}, headers=headers).json())["status"] in ("pending", "running"):
        pass
    assert job["status"] == "done", job
    return time.perf_counter() - begun, float(job["result"]["timings"]["harvest_s"])


def two_actors(options: argparse.Namespace) -> list[Row]:
    """An engine of one thread on each core as Ray actors, against the sum of what such engines do by themselves."""
    cores = os.cpu_count() or 1
    prompts = ragged(_engine().tokenizer.tokenizer, 2 * options.prompts)
    alone, at_once, actors = [], [], []
    with _scratch() as folder:
        for number in range(options.repeats):
            alone.append(cores * _processes(prompts[::2], folder / f"alone-{number}", 1))
            at_once.append(_processes(prompts, folder / f"at-once-{number}", cores))
            actors.append(tokens_per_second_on_a_cluster(prompts, folder / f"actors-{number}", LAYERS))
    speed = statistics.median(actors)
    return [
        Row(
            f"{cores} Ray actors / {cores} times one engine alone",
            speed / statistics.median(alone),
            0.9,
            "more",
            "x",
            f"tokens/s: {speed:.0f} and {statistics.median(alone):.0f}; one thread each",
        ),
        Row(
            f"{cores} Ray actors / {cores} processes at once",
            speed / statistics.median(at_once),
            0.9,
            "more",
            "x",
            f"tokens/s: {speed:.0f} and {statistics.median(at_once):.0f}; what the cores have to give",
        ),
    ]


def _processes(prompts: list[str], folder: Path, at_once: int) -> float:
    """Tokens/s of so many processes on their shares, each with its model loaded before the clock starts."""
    folder.mkdir()
    started = []
    for number in range(at_once):
        file = folder / f"prompts-{number}.json"
        file.write_text(json.dumps(prompts[number::at_once]))
        asked = {"step": "run", "prompts": str(file), "out": str(folder / f"run-{number}"), "layers": LAYERS}
        asked |= {"threads": 1, "waits": True, "shard_size": SHARD_PROMPTS}
        command = [sys.executable, str(HERE / "harvest_job.py"), json.dumps(asked)]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in started:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    found = [json.loads(process.communicate()[0].strip().splitlines()[-1]) for process in started]
    return float(sum(each["tokens"] for each in found) / max(each["seconds"] for each in found))


def memory(options: argparse.Namespace) -> list[Row]:
    """Peak memory of twenty times the prompts, which come from a generator."""
    peaks = []
    for count in (options.few, options.many):
        with _scratch() as folder:
            asked = {"step": "count", "count": count, "out": str(folder / "run"), "layers": LAYERS, "threads": 2}
            peaks.append(child(sys.executable, HERE / "harvest_job.py", asked, {})["peak_bytes"])
    detail = f"{peaks[0] / 1e6:.0f} and {peaks[1] / 1e6:.0f} MB for {options.few} and {options.many} prompts"
    return [Row("peak memory of twenty times the prompts", peaks[1] / peaks[0], 1.1, "less", "x", detail)]


def stream(options: argparse.Namespace) -> list[Row]:
    """Rows of one layer for training, shuffled, from files that the page cache has forgotten."""
    from streamtap.harvest.stream import ActivationStream

    with _scratch() as folder:
        fake_harvest(folder / "run", folder / "spool", options.rows)
        files = sorted(folder.glob("run/shard_*"))
        size = sum(file.stat().st_size for file in files)
        ratios = []

        def read() -> None:
            # Opened anew: the page cache forgets no page that a process still maps.
            batches = ActivationStream(folder / "run", batch_rows=4096, shuffle_rows=SHUFFLE_ROWS, layers=[1])
            assert sum(len(batch) for batch in batches) >= options.rows

        read()
        for _ in range(max(3, options.repeats)):
            forget(files)
            plain = seconds(lambda: read_through(files))
            forget(files)
            ratios.append(plain / seconds(read))
    detail = f"{min(ratios):.2f} to {max(ratios):.2f}; {options.rows} rows, {size / 1e6:.0f} MB, by {SHUFFLE_ROWS}"
    what = "ActivationStream, shuffled / sequential read, cold"
    return [Row(what, statistics.median(ratios), 0.5, "more", "x", detail)]


def beside_saelens(options: argparse.Namespace) -> list[Row]:
    """One layer of packed windows of 128 tokens, as SAELens' ``CacheActivationsRunner`` makes them."""
    asked = {"context": CONTEXT, "batch": WINDOW_BATCH, "tokens": options.tokens, "layer": LAYER}
    return _beside("SAELens", options.saelens, 1.0, "windows", asked, options)


def beside_nnsight(options: argparse.Namespace) -> list[Row]:
    """Three layers of every token, as nnsight's ``trace`` saves them, in sorted batches, as safetensors.

    That is the bare pass and a write: no checks, statistics, hashes, or flush to the disk.
    """
    return _beside("nnsight", options.nnsight, 0.9, "run", {"layers": LAYERS}, options)


def _beside(
    name: str, python: Path | None, required: float, step: str, asked: dict[str, Any], options: argparse.Namespace
) -> list[Row]:
    if python is None:
        raise SystemExit(f"this part compares with {name}: name its interpreter (make bench-harvest does).")
    model = str(demo_folder(Settings.from_environment()))
    wall, cpu = [], []
    with _scratch() as folder:
        file = folder / "prompts.json"
        file.write_text(json.dumps(ragged(_engine().tokenizer.tokenizer, options.prompts)))
        for number in range(options.repeats):
            common = {"prompts": str(file), "model": model, "threads": 2, **asked}
            offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
            theirs = child(
                python,
                HERE / f"harvest_{name.lower()}_job.py",
                {**common, "out": str(folder / f"theirs-{number}")},
                offline,
            )
            out = {"step": step, "out": str(folder / f"ours-{number}")}
            ours = child(sys.executable, HERE / "harvest_job.py", {**common, **out}, {})
            wall.append((theirs["seconds"] / theirs["tokens"]) / (ours["seconds"] / ours["tokens"]))
            cpu.append((theirs["cpu_seconds"] / theirs["tokens"]) / (ours["cpu_seconds"] / ours["tokens"]))
            speeds = f"{ours['tokens'] / ours['seconds']:.0f} and {theirs['tokens'] / theirs['seconds']:.0f} tokens/s"
    detail = f"{min(wall):.2f} to {max(wall):.2f}; CPU seconds {statistics.median(cpu):.2f} x; {speeds}"
    what = f"tokens/s / {name} {theirs['version']}"
    return [Row(what, statistics.median(wall), required, "more", "x", detail)]


def _fastest(body: Any, ids: list[list[int]]) -> tuple[Any, int]:
    """The bare batches of the fastest budget, found on every fifth prompt."""
    some = ids[::5]
    run_bare(body, bare_batches(some[:4], BUDGETS[0]))
    timed = {budget: seconds(lambda b=budget: run_bare(body, bare_batches(some, b))) for budget in BUDGETS}
    budget = min(timed, key=timed.__getitem__)
    return bare_batches(ids, budget), budget


_ENGINES: list[TransformersEngine] = []


def _engine() -> TransformersEngine:
    if not _ENGINES:
        _ENGINES.append(TransformersEngine.load("demo", dtype="float32", device="cpu"))
    return _ENGINES[0]


@contextmanager
def _scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="streamtap-bench-") as name:
        yield Path(name)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--prompts", type=int, default=200, help="prompts of 8 to 200 tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--few", type=int, default=1000, help="prompts of the smaller run whose memory is measured")
    parser.add_argument("--many", type=int, default=20_000, help="prompts of the larger one")
    parser.add_argument("--rows", type=int, default=1 << 18, help="rows that are streamed")
    parser.add_argument("--tokens", type=int, default=32_768, help="tokens of the comparison with SAELens")
    parser.add_argument("--saelens", type=Path, help="python of an environment with sae-lens")
    parser.add_argument("--nnsight", type=Path, help="python of an environment with nnsight")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if unknown := sorted(set(options.only) - set(PARTS)):
        parser.error(f"--only takes any of {','.join(PARTS)}; got {','.join(unknown)}.")
    return options


if __name__ == "__main__":
    sys.exit(main())
