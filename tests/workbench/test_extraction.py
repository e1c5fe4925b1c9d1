"""What is run and written: jobs, estimates, and runs that end in the middle or side by side."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamtap.cache import PromptKey, space
from streamtap.errors import CaptureMissed, NotEnoughSpace
from streamtap.fingerprint import tokens_digest
from streamtap.spec import CaptureSpec, Prompt
from streamtap.testing.fake_engine import FakeEngine
from streamtap.workbench.extraction import Job, estimate_bytes
from streamtap.workbench.lacking import Need
from streamtap.workbench.unified_cache import UnifiedCache

PROMPTS = [f"prompt {number} of {'many ' * (number % 5)}" for number in range(40)]
OpenCache = Callable[..., UnifiedCache]

# Warms PROMPTS up; with a number it stops for good before that batch, and says so.
SCRIPT = """
    import sys, time
    from streamtap.testing.fake_engine import FakeEngine
    from streamtap.workbench.unified_cache import UnifiedCache

    folder, stop = sys.argv[1], int(sys.argv[2])
    prompts = [f"prompt {number} of {'many ' * (number % 5)}" for number in range(40)]

    def wait(batch):
        if batch == stop:
            print("stopped", flush=True)
            time.sleep(600)

    cache = UnifiedCache(FakeEngine(before_batch=wait), cache_dir=folder, progress=False)
    print("ready", flush=True)
    sys.stdin.readline()
    stats = cache.warmup(prompts)
    print(stats.activations_cached, stats.activations_extracted, flush=True)
"""


@pytest.fixture
def open_cache(tmp_path: Path) -> OpenCache:
    def opened(engine: FakeEngine, **options: Any) -> UnifiedCache:
        return UnifiedCache(engine, **{"cache_dir": tmp_path, "progress": False, **options})

    return opened


@pytest.fixture
def start(tmp_path: Path) -> Any:
    running: list[subprocess.Popen[str]] = []

    def started(stop: int = -1) -> subprocess.Popen[str]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(tmp_path), str(stop)]
        process = subprocess.Popen(command, **pipes)  # type: ignore[call-overload]
        running.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield started
    for process in running:
        process.kill()
        process.communicate()


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def values_are_right(open_cache: OpenCache) -> None:
    engine = FakeEngine()
    cache = open_cache(engine)
    tokens = [engine.tokenizer.tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    for layer in range(4):
        np.testing.assert_array_equal(
            cache.activations(PROMPTS, layer), [engine.rows(each, layer)[-1] for each in tokens]
        )
    np.testing.assert_array_equal(cache.get_perplexity(PROMPTS), [engine.perplexity(each) for each in tokens])
    assert engine.runs == []
    assert cache.store.verify().sound


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), RuntimeError("a fault"), CaptureMissed("lost", layer=1)], ids=repr
)
def test_a_run_that_fails_keeps_what_it_made(error: BaseException, open_cache: OpenCache) -> None:
    def fail(batch: int) -> None:
        if batch == 6:
            raise error

    engine, cache = FakeEngine(), open_cache(FakeEngine(before_batch=fail))
    with pytest.raises(type(error)):
        cache.warmup(PROMPTS)
    stats = open_cache(engine).warmup(PROMPTS)

    assert (stats.activations_cached, stats.activations_extracted) == (24, 16)
    assert (stats.perplexity_cached, stats.perplexity_extracted) == (24, 16)
    assert len(engine.runs) == 16
    values_are_right(open_cache)


def test_a_killed_run_keeps_what_it_made(start: Callable[..., Any], open_cache: OpenCache) -> None:
    process = start(stop=7)
    go(process)
    assert process.stdout.readline() == "stopped\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    engine = FakeEngine()
    stats = open_cache(engine).warmup(PROMPTS)

    assert stats.activations_cached >= 4 * 6  # seven batches were handed over, of which one was on its way to the disk
    assert stats.activations_cached + stats.activations_extracted == 40
    assert len(engine.runs) == max(stats.activations_extracted, stats.perplexity_extracted) < 40
    values_are_right(open_cache)


def test_two_processes_warm_one_cache(start: Callable[..., Any], open_cache: OpenCache) -> None:
    both = [start(), start()]
    for process in both:
        go(process)
    for process in both:
        cached, extracted = map(int, process.stdout.readline().split())
        assert cached + extracted == 40
        assert process.wait(timeout=60) == 0

    values_are_right(open_cache)
    assert [each.prompts for each in open_cache(FakeEngine()).store.sets()] == [40, 40]


def test_a_full_disk_is_told_before_any_work(open_cache: OpenCache, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, free = FakeEngine(), space.shutil.disk_usage("/")._replace(free=1000)
    cache = open_cache(engine)
    monkeypatch.setattr(space.shutil, "disk_usage", lambda _: free)

    with pytest.raises(NotEnoughSpace, match=r"would write about .* where 1.0 KB \(1000 bytes\) are free"):
        cache.warmup(PROMPTS)
    assert engine.runs == []
    monkeypatch.undo()
    assert cache.warmup(PROMPTS).activations_extracted == 40


def key(*token_ids: int, positions: list[int] | None = None) -> PromptKey:
    own = None if positions is None else np.array(positions, np.int32)
    return PromptKey(tokens_digest(np.array(token_ids, np.int32), own), np.array(token_ids, np.int32), own)


@pytest.mark.parametrize(
    ("spec", "rows"),
    [
        ({"pooling": "mean"}, 3),
        ({"pooling": "none"}, 2000 + 3 + 2),
        ({"pooling": "none", "positions": "-5:"}, 5 + 3 + 2),
        ({"pooling": "none", "positions": "last"}, 1 + 1 + 2),
        ({"pooling": "none", "positions": [0, 1]}, 2 + 2 + 2),
    ],
)
def test_the_estimate_counts_the_rows(spec: dict[str, Any], rows: int) -> None:
    engine = FakeEngine(hidden=1000)
    keys = [key(*range(2000)), key(1, 2, 3), key(5, 6, 7, positions=[0, 2])]
    jobs = [Job(Need((0, 3), ()), keys)]
    payload = rows * 2 * 4 * 1000

    assert payload < estimate_bytes(jobs, engine.provenance, CaptureSpec(layers=(), **spec), 97) < 1.3 * payload


def test_the_estimate_counts_what_the_head_gives() -> None:
    about, keys = FakeEngine().provenance, [key(*range(500)), key(*range(100, 600))]
    found = {
        kind: estimate_bytes([Job(Need((), (kind,)), keys)], about, CaptureSpec(logits="all", logit_top_k=10), 97)
        for kind in ("perplexity", "token_nll", "logits")
    }

    assert 2 * 24 <= found["perplexity"] < 2 * 24 + 1000
    assert 1000 * 4 <= found["token_nll"] < 1000 * 4 * 1.05 + 1000
    assert 1000 * 80 <= found["logits"] < 1000 * 80 * 1.05 + 1000


def test_files_are_as_large_as_what_is_in_them(open_cache: OpenCache) -> None:
    engine = FakeEngine(n_layers=2, hidden=1024)
    cache = open_cache(engine, cache_pooled=False, compute_perplexity=False)
    prompts = [[(3 + i + j) % 97 for j in range(60)] for i in range(60)]
    cache.warmup(prompts)
    (found,) = cache.store.sets()
    payload = 60 * 60 * 2 * 1024 * 4

    assert found.rows == 3600
    assert payload < found.bytes < 1.02 * payload


def test_equal_tokens_are_run_once_whatever_they_came_from(open_cache: OpenCache) -> None:
    engine = FakeEngine()
    tokens = engine.tokenizer.tokenizer("same")["input_ids"]
    stats = open_cache(engine).warmup(["same", tokens, np.array(tokens), Prompt(text="same"), "other"])

    assert (stats.total_prompts, stats.activations_extracted, stats.perplexity_extracted) == (5, 5, 5)
    assert len(engine.runs) == 2


def test_scores_do_not_depend_on_positions(open_cache: OpenCache) -> None:
    engine = FakeEngine()
    tokens = engine.tokenizer.tokenizer("same")["input_ids"]
    own = [Prompt(token_ids=tokens, positions=[i]) for i in (0, 2)]
    open_cache(engine, layers=[1]).warmup(own[:1])  # in one pass with the rows
    since = len(engine.runs)

    np.testing.assert_array_equal(open_cache(engine).get_perplexity([*own, "same"]), [engine.perplexity(tokens)] * 3)
    assert open_cache(engine, positions="-1:", layers=[]).warmup(["same"]).perplexity_cached == 1
    assert len(engine.runs) == since
    other = Prompt(token_ids=[5, 6, 7], positions=[1])  # without rows
    np.testing.assert_array_equal(open_cache(engine).get_perplexity([other]), [engine.perplexity([5, 6, 7])])
