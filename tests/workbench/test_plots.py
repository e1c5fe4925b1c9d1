"""The layer-sweep picture: what is drawn is what the sweep says."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from numpy.typing import NDArray

from streamtap.errors import MissingExtra
from streamtap.workbench import plots
from streamtap.workbench.plots import plot_sweep
from streamtap.workbench.statements import Statements
from streamtap.workbench.sweep import Sweep, sweep_layers

Rows = dict[int, NDArray[np.float32]]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Every figure that is made during the test."""
    made: list[Figure] = []
    new_figure = plots._new_figure

    def keep() -> Figure:
        made.append(new_figure())
        return made[-1]

    monkeypatch.setattr(plots, "_new_figure", keep)
    return made


def test_it_writes_a_picture_with_the_probe_in_it(telling_sweep: Sweep, tmp_path: Path) -> None:
    path = plot_sweep(telling_sweep, tmp_path / "out" / "sweep.png")
    assert path == tmp_path / "out" / "sweep.png"
    pixels = imread(path)
    height, width, _ = pixels.shape
    assert (width, height) == (1280, 768)
    blue = np.array([0x00, 0x72, 0xB2]) / 255
    assert np.sum(np.abs(pixels[..., :3] - blue).max(axis=2) < 0.02) > 500


def test_the_line_is_the_held_out_accuracy_and_the_ring_the_chosen_layer(
    telling_sweep: Sweep, figures: list[Figure], tmp_path: Path
) -> None:
    plot_sweep(telling_sweep, tmp_path / "sweep.png")
    (axes,) = figures[0].axes
    curve, ring = axes.lines[0], axes.lines[1]
    np.testing.assert_array_equal(curve.get_xdata(), [0, 1, 2])
    np.testing.assert_allclose(curve.get_ydata(), [score.test.accuracy for score in telling_sweep.layers])
    assert list(ring.get_xdata()) == [1]
    assert list(ring.get_ydata()) == [telling_sweep.best.test.accuracy]


def test_the_legend_names_every_yardstick_with_its_value(
    telling_sweep: Sweep, figures: list[Figure], tmp_path: Path
) -> None:
    plot_sweep(telling_sweep, tmp_path / "sweep.png")
    legend = [text.get_text() for text in figures[0].legends[0].get_texts()]
    assert len(legend) == 6
    assert f"shuffled labels: {telling_sweep.control.mean:.2f} [" in " ".join(legend)
    assert "bag of words: 0.50" in legend
    assert "most frequent label: 0.50" in legend
    assert any(text.startswith("layer 1, chosen on validation rows: ") for text in legend)


def test_everything_drawn_is_inside_the_axes(telling_sweep: Sweep, figures: list[Figure], tmp_path: Path) -> None:
    plot_sweep(telling_sweep, tmp_path / "sweep.png")
    (axes,) = figures[0].axes
    bottom, top = axes.get_ylim()
    lows = [score.test.interval[0] for score in telling_sweep.layers] + [telling_sweep.control.interval[0]]
    assert bottom < min(lows)
    assert top == 1.0


def test_without_texts_there_is_no_bag_of_words_line(noise_sweep: Sweep, figures: list[Figure], tmp_path: Path) -> None:
    plot_sweep(noise_sweep, tmp_path / "sweep.png")
    legend = [text.get_text() for text in figures[0].legends[0].get_texts()]
    assert len(legend) == 5
    assert not any("words" in text for text in legend)


def test_without_matplotlib_the_error_is_the_command(
    telling_sweep: Sweep, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtra, match=r"pip install 'streamtap\[plots\]'"):
        plot_sweep(telling_sweep, tmp_path / "sweep.png")
    assert list(tmp_path.iterdir()) == []


def test_the_module_can_be_imported_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    spec = importlib.util.find_spec("streamtap.workbench.plots")
    assert spec is not None
    assert spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    assert callable(fresh.plot_sweep)


def test_one_layer_alone_can_be_drawn(
    statements: Statements, telling_rows: Rows, figures: list[Figure], tmp_path: Path
) -> None:
    sweep = sweep_layers({1: telling_rows[1]}, statements.labels, statements.groups)
    plot_sweep(sweep, tmp_path / "sweep.png")
    (axes,) = figures[0].axes
    assert list(axes.lines[0].get_xdata()) == [1]
    assert axes.get_xlim()[0] < 1 < axes.get_xlim()[1]
