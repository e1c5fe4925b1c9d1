"""The service against its floors: the engine in one process, the wire, the codec's parts, one request after another.

``python benchmarks/service.py [--only captures,overhead,codec,parallel,large] [--prompts 10000] [--body json]``

Every figure is a ratio, or a difference, of things run in turn in one run. ``captures`` takes by far the longest.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pybase64
import zstandard
from measure import Row, paired_ratio, report, seconds
from served import Served, resident_bytes, served
from workload import ragged

from streamtap import CaptureSpec, TransformersEngine
from streamtap.codec import base64_chunks, decode

HERE = Path(__file__).parent
PARTS = ("codec", "overhead", "large", "parallel", "captures")
CLIENTS = 16
DEMO = '[[models]]\nid = "demo"\ncheckpoint = "demo"\ndtype = "float32"\nidle_seconds = 0\n'
STUB = (
    '[[models]]\nid = "stub"\ncheckpoint = "stub-500"\nengine = "url"\nurl = "http://127.0.0.1:{port}"\nn_layers = 32\n'
    'hidden_size = 4096\nmax_model_len = 4096\nvocabulary = 49152\ntokenizer = "{tokenizer}"\n'
    "[limits]\nrate_per_minute = 1000000\n"
)


def main() -> int:
    """Run the parts asked for and print their table."""
    options = _options()
    rows: list[Row] = []
    if {"codec", "captures"} & set(options.only):
        engine = TransformersEngine.load("demo", dtype="float32", device="cpu")
    if "codec" in options.only:
        rows += codec(engine)
    if "overhead" in options.only or "large" in options.only:
        rows += behind_the_stub(options.only)
    if "parallel" in options.only:
        rows += parallel()
    if "captures" in options.only:
        rows += captures(engine, options.prompts, options.body)
    return report(rows, options.json)


def captures(engine: TransformersEngine, count: int, body: str) -> list[Row]:
    """One-token captures of every layer and position from 16 clients, against the engine called in this process."""
    prompts = ragged(engine.tokenizer.tokenizer, count, longest=64)
    spec, slices = CaptureSpec(layers="all", positions="all"), max(2, count // 500)
    inside = outside = 0.0
    rows, memory = 0, []
    with _scratch() as folder, served(DEMO, folder) as server, _clients(server) as ask:
        job = {"threads": CLIENTS, "max_tokens": 1, "capture": True, "binary": body == "safetensors"}
        ask({**job, "prompts": prompts[:CLIENTS]})
        for number in range(slices):
            mine = prompts[number::slices]
            inside += seconds(lambda mine=mine: sum(len(part.positions) for part in engine.capture(mine, spec)))
            done = ask({**job, "prompts": mine})
            outside += done["seconds"]
            rows += done["rows"]
            memory.append(server.memory_bytes())
            _tell(f"captures {number + 1}/{slices}: {inside / outside:.3f}, {memory[-1]}")
    wanted = sum(len(engine.tokenizer.read(prompt, 0)) for prompt in prompts)
    growth = {name: memory[-1][name] / memory[len(memory) // 4][name] for name in memory[-1]}
    detail = f"{count} prompts, {rows} rows; in process {wanted / inside:.0f} tokens/s"
    return [
        Row(f"captures over HTTP as {body} / in process, tokens/s", inside / outside, 0.85, "more", "x", detail),
        Row("captures lost", float(wanted - rows), 0.0, "less", ""),
        Row("memory of the gateway, end / first quarter", growth["gateway"], 1.1, "less", "x", _megabytes(memory)),
        Row("memory of the worker, end / first quarter", growth["worker"], 1.1, "less", "x"),
    ]


def parallel() -> list[Row]:
    """Sixteen generations of 64 tokens at once, against one after another."""
    prompts = [f"Story {number}: once upon a time there was a" for number in range(CLIENTS)]
    job = {"max_tokens": 64, "capture": False}
    ratios = []
    with _scratch() as folder, served(DEMO, folder) as server, _clients(server) as ask:
        ask({**job, "prompts": prompts[:2], "threads": 2})
        for _ in range(3):
            alone = ask({**job, "prompts": prompts[:4], "threads": 1})
            at_once = ask({**job, "prompts": prompts, "threads": CLIENTS})
            ratios.append((at_once["tokens"] / at_once["seconds"]) / (alone["tokens"] / alone["seconds"]))
            _tell(f"parallel {ratios[-1]:.2f}")
    spread = f"tokens/s; {min(ratios):.2f} to {max(ratios):.2f}"
    return [Row("16 generations at once / one by one", statistics.median(ratios), 5.0, "more", "x", spread)]


def behind_the_stub(parts: Sequence[str]) -> list[Row]:
    """What the gateway itself costs: time on a small answer, memory on a large one."""
    from streamtap.engines.demo_model import demo_folder
    from streamtap.settings import Settings

    tokenizer = demo_folder(Settings.from_environment()) / "tokenizer.json"
    rows: list[Row] = []
    with (
        _scratch() as folder,
        _stub() as port,
        served(STUB.format(port=port, tokenizer=tokenizer), folder) as server,
        httpx2.Client(timeout=120) as http,
    ):
        if "overhead" in parts:
            rows += _overhead(http, server, f"http://127.0.0.1:{port}")
        if "large" in parts:
            rows += _large(http, server)
    return rows


def _overhead(http: httpx2.Client, server: Served, engine: str) -> list[Row]:
    body = {"model": "stub", "prompt": "The capital of France is", "max_tokens": 1, "temperature": 0}
    headers = {"Authorization": f"Bearer {server.key}"}
    through = partial(http.post, f"{server.base}/completions", json=body, headers=headers)
    direct = partial(http.post, f"{engine}/v1/completions", json=body)
    times: dict[str, list[float]] = {"through": [], "direct": []}
    for _ in range(400):
        for name, call in (("direct", direct), ("through", through)):
            times[name].append(seconds(lambda call=call: call().raise_for_status()))
    medians = {name: statistics.median(values[50:]) * 1e3 for name, values in times.items()}
    detail = f"median of 350; {medians['through']:.2f} ms through, {medians['direct']:.2f} ms direct"
    return [Row("what the gateway adds", medians["through"] - medians["direct"], 3.0, "less", "ms", detail)]


def _large(http: httpx2.Client, server: Served) -> list[Row]:
    body = {"model": "stub", "prompt": "one two three four five", "max_tokens": 1, "output_residual_stream": True}
    headers = {"Authorization": f"Bearer {server.key}"}
    idle = peak = resident_bytes(server.process.pid)
    size = 0
    with http.stream("POST", f"{server.base}/completions", json=body, headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        for piece in answer.iter_raw():
            size += len(piece)
            peak = max(peak, resident_bytes(server.process.pid))
    detail = f"{size / 1e6:.0f} MB passed on; {idle / 1e6:.0f} MB idle"
    assert size > 490e6, size
    return [Row("gateway's memory on a 500 MB answer, above idle", (peak - idle) / 2**20, 64.0, "less", "MB", detail)]


def codec(engine: TransformersEngine) -> list[Row]:
    """Frame and base64 made piece by piece, against zstd level 1 and pybase64 called once each on the same bytes."""
    import ml_dtypes

    prompts = ragged(engine.tokenizer.tokenizer, 24, longest=200)
    parts = list(engine.capture(prompts, CaptureSpec(layers="all", positions="all")))
    values = np.stack([np.concatenate([part.acts[layer] for part in parts]) for layer in parts[0].layers])
    values = values.astype(ml_dtypes.bfloat16)
    raw = values.tobytes()
    frame = zstandard.ZstdCompressor(level=1).compress(raw)
    data = pybase64.b64encode(frame)
    about = {"dtype": "int16", "original_dtype": "torch.bfloat16", "shape": values.shape, "compression": "zstd"}

    def parts_out() -> None:
        pybase64.b64encode(zstandard.ZstdCompressor(level=1).compress(raw))

    def out() -> None:
        for _ in base64_chunks(values):
            pass

    def parts_in() -> None:
        zstandard.ZstdDecompressor().decompress(pybase64.b64decode(data, validate=True))

    def back() -> None:
        decode(data, **about)

    assert np.array_equal(decode(b"".join(base64_chunks(values)), **about).view(np.int16), values.view(np.int16))
    size = f"{len(raw) / 1e6:.0f} MB of bf16"
    rows = []
    for name, floor, ours in (("encode", parts_out, out), ("decode", parts_in, back)):
        ratio, _ = paired_ratio(floor, ours, 9)
        rows.append(Row(f"codec {name} / its parts alone", ratio, 0.9, "more", "x", size))
        both, _ = paired_ratio(lambda ours=ours: (ours(), ours()), lambda ours=ours: _at_once(ours), 9)
        rows.append(Row(f"codec {name}, two at once / in turn", both, 1.8, "more", "x", size))
    return rows


def _at_once(work: Callable[[], None]) -> None:
    other = threading.Thread(target=work)
    other.start()
    work()
    other.join()


@contextmanager
def _clients(server: Served) -> Iterator[Callable[[dict[str, Any]], dict[str, Any]]]:
    command = [sys.executable, str(HERE / "service_client.py")]
    environ = {**os.environ, **server.environ}
    with subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        sink, source = process.stdin, process.stdout

        def ask(job: dict[str, Any]) -> dict[str, Any]:
            sink.write(json.dumps(job) + "\n")
            sink.flush()
            answer: dict[str, Any] = json.loads(source.readline())
            return answer

        yield ask
        sink.close()


@contextmanager
def _stub() -> Iterator[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    process = subprocess.Popen([sys.executable, str(HERE / "engine_stub.py"), str(port)])
    try:
        _wait_for(f"http://127.0.0.1:{port}/health")
        yield port
    finally:
        process.terminate()
        process.wait(10)


def _wait_for(url: str) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            httpx2.get(url)
            return
        except httpx2.TransportError:
            time.sleep(0.05)
    raise SystemExit(f"{url} does not answer")


@contextmanager
def _scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def _megabytes(memory: Sequence[Mapping[str, int]]) -> str:
    return f"gateway {memory[-1]['gateway'] / 1e6:.0f} MB, worker {memory[-1]['worker'] / 1e6:.0f} MB"


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--prompts", type=int, default=10_000)
    parser.add_argument("--body", choices=("safetensors", "json"), default="safetensors", help="of the captures")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
