"""The main job from end to end: statements, every layer's rows, a probe on each, and what they reach."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from streamtap.activations import Provenance
from streamtap.engines.base import Engine
from streamtap.errors import InvalidInput
from streamtap.layers import LayerSpec
from streamtap.pooling import Pooling
from streamtap.probes.rows import Rows
from streamtap.probes.scores import Scores
from streamtap.workbench.by_subject import score_by_subject
from streamtap.workbench.progress import Advance, progress_bar
from streamtap.workbench.statements import Statements, load_statements
from streamtap.workbench.sweep import Sweep, sweep_layers
from streamtap.workbench.unified_cache import UnifiedCache
from streamtap.workbench.warmup_stats import WarmupStats

#: Below this a part of the split would be too small to say anything.
FEWEST_STATEMENTS = 40
_POOLING: Pooling = "last_token"
_GROUP = 4
# Small enough for the bar to move; as fast as larger batches of sentences so short.
_BATCH_PROMPTS = 32


@dataclass(frozen=True, eq=False)
class DemoResult:
    """What the demo found; ``seconds`` is the wall time of each step, by its name."""

    statements: Statements
    stats: WarmupStats
    sweep: Sweep
    by_subject: Mapping[str, Scores]
    provenance: Provenance
    seconds: dict[str, float] = field(default_factory=dict)


def run_demo(
    model: str | Engine = "demo",
    *,
    layers: LayerSpec = "all",
    limit: int | None = None,
    cache_dir: Path | str | None = None,
    statements: Statements | None = None,
    progress: bool | None = None,
    waiting: Callable[[str], AbstractContextManager[Any]] = nullcontext,
) -> DemoResult:
    """Probe every layer of ``model`` for whether statements are true.

    Args:
        model: As for ``UnifiedCache``.
        layers: Which layers to probe.
        limit: At most so many statements, taken evenly from all subjects in whole groups.
        cache_dir: Folder of the activations.
        statements: Others than those of the package.
        progress: Show progress bars; None shows them on a terminal only.
        waiting: Entered, with what is being done, while there is no bar.

    Raises:
        InvalidInput: too few statements, or the demo model is not here; the message says how to get it.
    """
    asked = some_statements(load_statements() if statements is None else statements, limit)
    seconds: dict[str, float] = {}
    with UnifiedCache(
        model,
        layers,
        compute_perplexity=False,
        pooling=_POOLING,
        batch_size=_BATCH_PROMPTS,
        cache_dir=cache_dir,
        progress=progress,
    ) as cache:
        with _timed(seconds, "model"), waiting("opening the model"):
            provenance = cache.provenance
        with _timed(seconds, "rows"):
            stats = cache.warmup(asked.texts)
            rows = cache.rows(asked.texts).acts
    with _timed(seconds, "probes"):
        sweep = _sweep(rows, asked, progress)
        by_subject = score_by_subject(sweep, rows[sweep.best_layer], asked.labels, asked.subjects)
    return DemoResult(asked, stats, sweep, by_subject, provenance, seconds)


def write_demo(result: DemoResult, folder: str | Path) -> tuple[Path, Path]:
    """Write the picture and the report of ``result``; their paths: ``layer-sweep.png`` and ``report.html``.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    from streamtap.workbench.plots import plot_sweep
    from streamtap.workbench.report import write_report

    with _timed(result.seconds, "report"):
        picture = plot_sweep(result.sweep, Path(folder) / "layer-sweep.png")
        report = write_report(
            result.sweep,
            Path(folder) / "report.html",
            statements=result.statements,
            by_subject=result.by_subject,
            provenance=result.provenance,
            pooling=_POOLING,
            plot_png=picture,
        )
    return picture, report


def some_statements(statements: Statements, limit: int | None) -> Statements:
    """At most ``limit`` of ``statements``: whole groups, spread evenly over the set.

    Raises:
        InvalidInput: ``limit`` is too small.
    """
    if limit is None or limit >= len(statements):
        return statements
    if limit < FEWEST_STATEMENTS:
        raise InvalidInput(f"the demo needs at least {FEWEST_STATEMENTS} statements to say anything; got {limit}.")
    names = np.unique(statements.groups)
    kept = names[np.linspace(0, len(names) - 1, limit // _GROUP).round().astype(int)]
    places = np.flatnonzero(np.isin(statements.groups, kept))
    return replace(
        statements,
        texts=tuple(statements.texts[i] for i in places),
        labels=statements.labels[places],
        subjects=tuple(statements.subjects[i] for i in places),
        groups=statements.groups[places],
    )


def _sweep(rows: Mapping[int, Rows], statements: Statements, progress: bool | None) -> Sweep:
    with ExitStack() as stack:
        bar: list[Advance] = []

        def tick(done: int, total: int) -> None:
            if not bar:
                bar.append(stack.enter_context(progress_bar("probing", total, show=progress)))
            bar[0](1)

        return sweep_layers(rows, statements.labels, statements.groups, statements.texts, progress=tick)


@contextmanager
def _timed(seconds: dict[str, float], step: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[step] = time.perf_counter() - started
