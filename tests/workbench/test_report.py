"""The HTML report: it says what the sweep says, by itself, and cannot be broken by a name."""

from __future__ import annotations

import base64
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from streamtap.activations import Provenance
from streamtap.errors import InvalidInput
from streamtap.probes.scores import Scores
from streamtap.workbench.by_subject import score_by_subject
from streamtap.workbench.report import write_report
from streamtap.workbench.statements import Statements
from streamtap.workbench.sweep import Sweep

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
PROVENANCE = Provenance(
    model="demo", commit="sha256:ab12", tokenizer="sha256:cd34", dtype="float32", quantization="Q4_1",
    engine_version="5.24.0", n_layers=3, hidden=6,
)  # fmt: skip

Rows = dict[int, NDArray[np.float32]]


class Page(HTMLParser):
    """Elements with their attributes, and the text of each table row."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"style", "head"}.isdisjoint(self.open) or "title" in self.open:
            self.text += data
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data

    def attributes(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def row(self, name: str) -> list[str]:
        return next(cells for cells in self.rows if cells[0] == name)


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "sweep.png"
    path.write_bytes(PNG)
    return path


@pytest.fixture(scope="module")
def by_subject(statements: Statements, telling_rows: Rows, telling_sweep: Sweep) -> dict[str, Scores]:
    return score_by_subject(telling_sweep, telling_rows[1], statements.labels, statements.subjects)


@pytest.fixture
def page(
    telling_sweep: Sweep, statements: Statements, by_subject: dict[str, Scores], picture: Path, tmp_path: Path
) -> Page:
    path = write_report(
        telling_sweep,
        tmp_path / "report.html",
        statements=statements,
        by_subject=by_subject,
        provenance=PROVENANCE,
        pooling="last_token",
        plot_png=picture,
    )
    return Page(path)


def test_every_layer_has_its_row(page: Page, telling_sweep: Sweep) -> None:
    for score in telling_sweep.layers:
        low, high = score.test.interval
        name = f"{score.layer} (chosen)" if score.layer == 1 else str(score.layer)
        assert page.row(name) == [
            name, f"{score.test.accuracy:.2f}", f"{low:.2f}–{high:.2f}", f"{score.validation.accuracy:.2f}"
        ]  # fmt: skip


def test_every_subject_has_its_row(page: Page, statements: Statements, by_subject: dict[str, Scores]) -> None:
    for subject in set(statements.subjects):
        n = statements.subjects.count(subject)
        cells = page.row(subject)
        assert cells[1:3] == [str(n), str(n // 2)]
        expected = by_subject.get(subject)
        assert cells[3] == (str(expected.n) if expected else "0")
        assert cells[4] == (f"{expected.accuracy:.2f}" if expected else "–")


def test_it_says_what_was_run_and_what_it_was_measured_against(page: Page, telling_sweep: Sweep) -> None:
    for said in ("demo", "sha256:ab12", "float32, from Q4_1", "transformers 5.24.0 on cpu", "last_token",
                 "3 of 3, rows 6 wide", "624: 312 true, 312 false, 156 groups",
                 "logistic_regression, random_state 0"):  # fmt: skip
        assert said in page.text
    assert page.row("bag of words")[1] == "0.50"
    assert page.row("shuffled labels (20 times)")[1] == f"{telling_sweep.control.mean:.2f}"
    assert "does not show that the model uses it" in page.text


def test_it_needs_nothing_else(page: Page) -> None:
    assert {tag for tag, _ in page.elements}.isdisjoint({"script", "link", "iframe", "object", "embed"})
    assert re.findall(r"https?:|url\(|@import", page.source) == []
    (image,) = page.attributes("img")
    source = image["src"]
    assert source is not None
    assert base64.b64decode(source.removeprefix("data:image/png;base64,")) == PNG
    policy = page.attributes("meta")[2]
    assert policy["http-equiv"] == "Content-Security-Policy"
    assert "default-src 'none'" in str(policy["content"])


def test_it_can_be_read_without_seeing_it(page: Page, telling_sweep: Sweep) -> None:
    assert page.attributes("html") == [{"lang": "en"}]
    assert page.text.lstrip().startswith("Which layer knows what is true: demo")
    alternative = page.attributes("img")[0]["alt"]
    assert alternative is not None
    assert f"at most {telling_sweep.best.test.accuracy:.2f} at layer 1" in alternative
    assert all(header.get("scope") in ("row", "col") for header in page.attributes("th"))
    assert len(page.attributes("caption")) == len(page.attributes("table")) == 3


def test_a_result_above_all_yardsticks_is_called_one(page: Page) -> None:
    assert "The whole interval lies above" in page.text


def test_noise_is_not_called_knowledge(
    noise_sweep: Sweep, statements: Statements, picture: Path, tmp_path: Path
) -> None:
    path = write_report(
        noise_sweep,
        tmp_path / "noise.html",
        statements=statements,
        by_subject={},
        provenance=PROVENANCE,
        pooling="mean",
        plot_png=picture,
    )
    text = Page(path).text
    assert "does not show that the layer knows" in text
    assert "The whole interval lies above" not in text
    assert "bag of words" not in text


def test_names_are_text_and_never_markup(
    telling_sweep: Sweep, statements: Statements, by_subject: dict[str, Scores], picture: Path, tmp_path: Path
) -> None:
    nasty = '<script>alert("1")</script>&amp;${title}'
    renamed = replace(statements, subjects=(nasty,) * len(statements))
    path = write_report(
        telling_sweep,
        tmp_path / "report.html",
        statements=renamed,
        by_subject={nasty: by_subject["capitals"]},
        provenance=replace(PROVENANCE, model=nasty),
        pooling="last_token",
        plot_png=picture,
    )
    page = Page(path)
    assert page.attributes("script") == []
    assert page.row(nasty)[1] == "624"
    assert page.text.count(nasty) == 4


def test_a_model_folder_is_named_without_its_path(
    telling_sweep: Sweep, statements: Statements, picture: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "private" / "tiny-llama"
    path = write_report(
        telling_sweep,
        tmp_path / "report.html",
        statements=statements,
        by_subject={},
        provenance=replace(PROVENANCE, model=str(folder)),
        pooling="last_token",
        plot_png=picture,
    )
    text = Page(path).text
    assert "tiny-llama" in text
    assert "private" not in text


def test_what_does_not_fit_is_refused(
    telling_sweep: Sweep, statements: Statements, picture: Path, tmp_path: Path
) -> None:
    words = tmp_path / "sweep.txt"
    words.write_text("not a picture")
    fewer = replace(statements, texts=statements.texts[:40])
    for given, png, said in ((fewer, picture, "made on 624 prompts, and there are 40"), (statements, words, "a PNG")):
        with pytest.raises(InvalidInput, match=said):
            write_report(
                telling_sweep,
                tmp_path / "report.html",
                statements=given,
                by_subject={},
                provenance=PROVENANCE,
                pooling="last_token",
                plot_png=png,
            )
    assert not (tmp_path / "report.html").exists()
