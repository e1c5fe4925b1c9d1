"""Pictures of results; the only home of matplotlib, which is imported when one is drawn."""

from __future__ import annotations

import io
import os
from math import floor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamtap.errors import MissingExtra
from streamtap.workbench.sweep import Sweep
from streamtap.workbench.whole_file import write_whole

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which colour-blind readers can tell apart; each line differs in dash too.
_PROBE = "#0072B2"
_CONTROL = "#D55E00"
_WORDS = "#007A5A"
_CHANCE = "#595959"


def plot_sweep(sweep: Sweep, path: str | os.PathLike[str]) -> Path:
    """Write a PNG of held-out accuracy per layer, beside what text alone and shuffled labels reach.

    The band is each layer's 95 % interval; the ring is the layer that the validation rows chose.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    figure = _new_figure()
    axes = figure.add_subplot()
    lines = [*_draw_layers(axes, sweep), *_draw_yardsticks(axes, sweep)]
    _dress(axes, sweep)
    figure.legend(handles=lines, loc="outside lower center", ncols=2, frameon=False, fontsize="small")
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=160, facecolor="white", metadata={"Software": None})
    return write_whole(path, image.getvalue())


def _new_figure() -> Figure:
    try:
        # Without pyplot: no window, no state that outlives the picture.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtra("drawing a sweep needs matplotlib: pip install 'streamtap[plots]'.") from error
    return Figure(figsize=(8, 4.8), layout="constrained")


def _draw_layers(axes: Axes, sweep: Sweep) -> list[Artist]:
    numbers = [score.layer for score in sweep.layers]
    accuracies = [score.test.accuracy for score in sweep.layers]
    low, high = zip(*(score.test.interval for score in sweep.layers), strict=True)
    best = sweep.best
    ring: dict[str, Any] = {
        "markersize": 12,
        "markerfacecolor": "none",
        "markeredgecolor": "black",
        "markeredgewidth": 1.8,
    }
    chosen = f"layer {best.layer}, chosen on validation rows: {_interval(best.test.accuracy, best.test.interval)}"
    line: dict[str, Any] = {"color": _PROBE, "linewidth": 2, "marker": "o", "markersize": 4, "zorder": 5}
    return [
        *axes.plot(numbers, accuracies, label=f"probe on that layer ({sweep.classifier})", **line),
        axes.fill_between(numbers, low, high, color=_PROBE, alpha=0.16, linewidth=0, zorder=4, label="95 % interval"),
        *axes.plot([best.layer], [best.test.accuracy], "o", zorder=6, label=chosen, **ring),
    ]


def _draw_yardsticks(axes: Axes, sweep: Sweep) -> list[Artist]:
    control, chance = sweep.control, sweep.majority.accuracy
    axes.axhspan(*control.interval, color=_CONTROL, alpha=0.14, linewidth=0, zorder=1)
    shuffled = f"shuffled labels: {_interval(control.mean, control.interval)}"
    lines = [
        axes.axhline(control.mean, color=_CONTROL, linewidth=1.6, linestyle=(0, (6, 3)), label=shuffled),
        axes.axhline(chance, color=_CHANCE, linewidth=1, label=f"most frequent label: {chance:.2f}"),
    ]
    if sweep.bag_of_words is not None:
        words = sweep.bag_of_words.accuracy
        style: dict[str, Any] = {"color": _WORDS, "linewidth": 2, "linestyle": (0, (1, 1.5))}
        lines.append(axes.axhline(words, label=f"bag of words: {words:.2f}", **style))
    return list(lines)


def _dress(axes: Axes, sweep: Sweep) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_title("Held-out accuracy of a probe on each layer", loc="left", fontweight="bold")
    axes.set_xlabel("layer (output of that block)")
    axes.set_ylabel(f"accuracy on {sweep.best.test.n} held-out rows")
    axes.set_xlim(sweep.layers[0].layer - 0.7, sweep.layers[-1].layer + 0.7)
    axes.set_ylim(_floor(sweep), 1.0)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def _floor(sweep: Sweep) -> float:
    """Lower end of the axis: below all that is drawn, in steps of 0.05."""
    drawn = [score.test.interval[0] for score in sweep.layers]
    drawn += [sweep.control.interval[0], sweep.majority.accuracy]
    drawn += [] if sweep.bag_of_words is None else [sweep.bag_of_words.accuracy]
    return max(0.0, floor(min(drawn) * 20 - 0.2) / 20)


def _interval(middle: float, ends: tuple[float, float]) -> str:
    return f"{middle:.2f} [{ends[0]:.2f}, {ends[1]:.2f}]"
