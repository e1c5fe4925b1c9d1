"""How near each engine's rows are to the plain float32 model's, and how fast they come.

``python benchmarks/parity.py [--vllm PYTHON] [--nnsight PYTHON] [--only local32,api] [--json FILE] [--docs FILE]``

All of them in one run, with the same prompts, each in a process of its own with the python of its environment: every
token's row of every layer. ``--vllm`` and ``--nnsight`` name the interpreters of environments with those libraries and
what Streamtap needs (``make bench-parity`` makes them). It prints the table as Markdown; ``--docs`` puts it between the
marks of a page. ``--read FILE`` makes the table of what an earlier run wrote.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from served import served

HERE = Path(__file__).parent
BEGIN, END = "<!-- parity: begin -->", "<!-- parity: end -->"
SERVED = """
[[models]]
id = "{model}"
checkpoint = "{model}"
dtype = "float32"
device = "{device}"
idle_seconds = 0
"""


@dataclass(frozen=True)
class Run:
    """One engine: what the table calls it, the backend, how it is loaded, and whose python runs it."""

    title: str
    backend: str
    options: Mapping[str, Any] = field(default_factory=dict)
    python: str = "main"


RUNS = {
    "local32": Run("`local`, float32", "local", {"dtype": "float32"}),
    "local16": Run("`local`, bfloat16", "local", {"dtype": "bfloat16"}),
    "nnsight": Run("`nnsight`, float32", "nnsight", {"dtype": "float32"}, "nnsight"),
    "vllm32": Run("`vllm`, float32", "vllm", {"dtype": "float32"}, "vllm"),
    "vllm16": Run("`vllm`, bfloat16", "vllm", {"dtype": "bfloat16"}, "vllm"),
    "api": Run("`api`, a float32 engine behind it", "api"),
}
#: Which of them are told what to run on; vLLM chooses by itself, and a service has chosen.
WITH_DEVICE = ("local", "nnsight")
#: Without a GPU vLLM would keep a core for itself, and the others have as many threads as are asked for.
VLLM_ENVIRON = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
SILENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


def main() -> int:
    """Run what was asked for and show its table."""
    options = _options()
    found = json.loads(options.read.read_text()) if options.read else measured(options)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    text = table(found)
    print(text)
    if options.docs:
        page = options.docs.read_text(encoding="utf-8")
        options.docs.write_text(placed(page, text), encoding="utf-8")
    return 0


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """The plain model and each engine, one after the other."""
    with tempfile.TemporaryDirectory(prefix="streamtap-bench-") as name:
        folder = Path(name)
        asked = {"prompts": options.prompts, "longest": options.longest}
        about = _step("reference", "main", {}, asked, folder, options)
        _tell(f"plain model: {about['tokens'] / about['seconds']:.0f} tokens/s")
        engines = {}
        for key in options.only:
            engines[key] = _engine(key, folder, options)
            _tell(f"{key}: {engines[key]['tokens_per_second']:.0f} tokens/s, {engines[key]['groups'][-1]}")
    machine = {
        "cores": os.cpu_count(),
        "threads": options.threads,
        "device": options.device,
        "machine": platform.processor() or platform.machine(),
        "model": options.model,
    }
    return {"about": {**machine, **about}, "engines": engines}


def table(found: Mapping[str, Any]) -> str:
    """Markdown: a line an engine, the worst of each third of the layers, and tokens/s."""
    about, engines = found["about"], found["engines"]
    groups = [each["layers"] for each in next(iter(engines.values()))["groups"]]
    heads = [f"layers {first} to {last}" for first, last in groups]
    lines = [_line(["backend", *heads, "tokens/s"]), _line(["---"] * (len(heads) + 1) + ["---:"])]
    for key, each in engines.items():
        cells = [_cell(group) for group in each["groups"]]
        lines.append(_line([f"{RUNS[key].title}; rows {each['dtype']}", *cells, f"{each['tokens_per_second']:.0f}"]))
    plain = about["tokens"] / about["seconds"]
    text = (
        "The worst cosine and the worst relative error ‖a − b‖ / ‖b‖ of any row, and in brackets the median row's "
        "error, against the plain `transformers` model in float32, one prompt at a time without padding "
        f"({plain:.0f} tokens/s): {about['prompts']} prompts of "
        f"{about['shortest']} to {about['longest']} tokens, {about['tokens']} in all, every token's row of every layer "
        f"of `{about['model']}`, in one run on {about['device']} with {about['threads']} threads. "
        f"{_versions(engines)}. A self-check's relative error is that of a layer's rows together, which is smaller."
    )
    return "\n".join([*lines, "", text])


def _cell(group: Mapping[str, Any]) -> str:
    worst, middle = group["worst_relative_error"], group["median_relative_error"]
    return f"{group['worst_cosine']:.6f}, {worst:.1e} ({middle:.1e})"


def placed(page: str, text: str) -> str:
    """``page`` with ``text`` between its marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"the page has no place for the table: it needs the lines {BEGIN} and {END}.")
    return f"{before}{begin}\n{text}\n{end}{after}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _versions(engines: Mapping[str, Any]) -> str:
    known: dict[str, set[str]] = {}
    for each in engines.values():
        for name, number in each["versions"].items():
            known.setdefault(name, set()).add(number)
    return ", ".join(f"{name} {' and '.join(sorted(numbers))}" for name, numbers in sorted(known.items()))


def _engine(key: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    run = RUNS[key]
    loading = {**run.options, **({"device": options.device} if run.backend in WITH_DEVICE else {})}
    asked = {"backend": run.backend, "options": loading}
    with _around(run, folder, options) as environ:
        return _step(key, run.python, environ, asked, folder, options)


@contextmanager
def _around(run: Run, folder: Path, options: argparse.Namespace) -> Iterator[Mapping[str, str]]:
    """What the engine's process needs around it: a started server, or words to vLLM; gives its environment."""
    if run.backend == "api":
        config = SERVED.format(model=options.model, device=options.device)
        with served(config, folder / "server") as server:
            yield server.environ
    else:
        yield VLLM_ENVIRON if run.backend == "vllm" else {}


def _step(
    step: str,
    python: str,
    environ: Mapping[str, str],
    asked: Mapping[str, Any],
    folder: Path,
    options: argparse.Namespace,
) -> dict[str, Any]:
    interpreter = {"main": Path(sys.executable), "vllm": options.vllm, "nnsight": options.nnsight}[python]
    arguments = {"step": step, "folder": str(folder), "model": options.model, **asked}
    path = os.pathsep.join([str(HERE.parent / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    threads = {"OMP_NUM_THREADS": str(options.threads)}
    done = subprocess.run(
        [str(interpreter), str(HERE / "parity_job.py"), json.dumps(arguments)],
        env={**os.environ, **SILENT, **threads, **environ, "PYTHONPATH": path},
        stdout=sys.stderr,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{step} ended with status {done.returncode}; the reason stands above.")
    found: dict[str, Any] = json.loads((folder / f"{step}.json").read_text())
    return found


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(RUNS))
    parser.add_argument("--vllm", type=Path, help="python of an environment with vllm and vllm-lens")
    parser.add_argument("--nnsight", type=Path, default=Path(sys.executable), help="python of one with nnsight")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="cpu", help="of local, nnsight and the served model")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--longest", type=int, default=120, help="tokens of the longest prompt; the shortest has 8")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--docs", type=Path, help="a page with marks, where the table goes")
    parser.add_argument("--read", type=Path, help="run nothing: make the table of this file")
    options = parser.parse_args()
    if unknown := sorted(set(options.only) - set(RUNS)):
        parser.error(f"--only takes any of {','.join(RUNS)}; got {','.join(unknown)}.")
    if options.vllm is None and not options.read and any(RUNS[key].python == "vllm" for key in options.only):
        parser.error("vLLM runs in an environment of its own: name its python with --vllm (make bench-parity does).")
    return options


if __name__ == "__main__":
    raise SystemExit(main())
