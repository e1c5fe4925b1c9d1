"""A sweep as one HTML file that needs nothing else: no network, no script, no second file."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable, Mapping
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from streamtap.activations import Provenance
from streamtap.errors import InvalidInput
from streamtap.probes.scores import Scores
from streamtap.workbench.statements import Statements
from streamtap.workbench.sweep import LayerScore, Sweep
from streamtap.workbench.whole_file import write_whole

_PNG = b"\x89PNG\r\n\x1a\n"


def write_report(
    sweep: Sweep,
    path: str | os.PathLike[str],
    *,
    statements: Statements,
    by_subject: Mapping[str, Scores],
    provenance: Provenance,
    pooling: str,
    plot_png: str | os.PathLike[str],
) -> Path:
    """Write the result of ``sweep`` on ``statements`` as a self-contained HTML page.

    ``by_subject`` are the chosen layer's test scores (``score_by_subject``); ``provenance`` and
    ``pooling`` say where the rows came from; ``plot_png`` is the picture of ``plot_sweep``, which
    is embedded.

    Raises:
        InvalidInput: ``plot_png`` is not a PNG, or the split is not one of these statements.
        OSError: the picture cannot be read or the page cannot be written.
    """
    _check_fits(sweep, statements)
    page = Template(files("streamtap.workbench").joinpath("report.html").read_text(encoding="utf-8"))
    text = page.substitute(
        title=escape(f"Which layer knows what is true: {_short_name(provenance.model)}"),
        lead=escape(_lead(sweep, pooling)),
        verdict=escape(_verdict(sweep)),
        image=_embedded(Path(plot_png)),
        image_text=escape(_image_text(sweep)),
        image_caption=escape(
            "Each point is a probe trained on one layer; the band is its 95 % interval, the ring the chosen layer."
        ),
        yardsticks="\n".join(_yardstick_rows(sweep)),
        layers="\n".join(_layer_row(score) for score in sweep.layers),
        subjects="\n".join(_subject_rows(statements, by_subject)),
        caveats="\n".join(f"<li>{escape(caveat)}</li>" for caveat in _caveats(sweep)),
        facts="\n".join(_facts(sweep, statements, provenance, pooling)),
    )
    return write_whole(path, text.encode())


def _lead(sweep: Sweep, pooling: str) -> str:
    best = sweep.best
    return (
        f"From the {pooling.replace('_', '-')} row of layer {best.layer}, a probe tells true statements from false "
        f"ones with an accuracy of {best.test.accuracy:.2f} (95 % interval {_range(best.test.interval)}) on "
        f"{best.test.n} held-out statements about entities that it never saw."
    )


def _verdict(sweep: Sweep) -> str:
    low = sweep.best.test.interval[0]
    rivals = [sweep.control.interval[1], sweep.majority.accuracy]
    rivals += [] if sweep.bag_of_words is None else [sweep.bag_of_words.accuracy]
    if low > max(rivals):
        return (
            "The whole interval lies above shuffled labels, the most frequent label and the words of the text: the "
            "layer holds something about truth that the words alone do not give away."
        )
    return (
        "The interval reaches down to what shuffled labels, the most frequent label or the words of the text reach: "
        "this run does not show that the layer knows."
    )


def _image_text(sweep: Sweep) -> str:
    first, last = sweep.layers[0], sweep.layers[-1]
    top = max(sweep.layers, key=lambda score: score.test.accuracy)
    return (
        f"Line of held-out accuracy over layers {first.layer} to {last.layer}: {first.test.accuracy:.2f} at the first, "
        f"at most {top.test.accuracy:.2f} at layer {top.layer}, {last.test.accuracy:.2f} at the last. "
        f"Layer {sweep.best_layer} is ringed. The table below has every value."
    )


def _yardstick_rows(sweep: Sweep) -> Iterable[str]:
    control = sweep.control
    shuffled = f"shuffled labels ({len(control.accuracies)} times)"
    yield _row(shuffled, f"{control.mean:.2f}", _range(control.interval))
    yield _row("most frequent label", f"{sweep.majority.accuracy:.2f}", _range(sweep.majority.interval))
    for name, scores in (("bag of words", sweep.bag_of_words), ("length of the text", sweep.text_length)):
        if scores is not None:
            yield _row(name, f"{scores.accuracy:.2f}", _range(scores.interval))


def _layer_row(score: LayerScore) -> str:
    name = f"{score.layer} (chosen)" if score.chosen else str(score.layer)
    cells = (f"{score.test.accuracy:.2f}", _range(score.test.interval), f"{score.validation.accuracy:.2f}")
    return _row(name, *cells, chosen=score.chosen)


def _subject_rows(statements: Statements, by_subject: Mapping[str, Scores]) -> Iterable[str]:
    for subject in dict.fromkeys(statements.subjects):
        labels = [
            int(label) for label, name in zip(statements.labels, statements.subjects, strict=True) if name == subject
        ]
        scores = by_subject.get(subject)
        held_out = (
            ("0", "–", "–") if scores is None else (str(scores.n), f"{scores.accuracy:.2f}", _range(scores.interval))
        )
        yield _row(subject, str(len(labels)), str(sum(labels)), *held_out)


def _caveats(sweep: Sweep) -> Iterable[str]:
    yield (
        "That a probe can read something from a layer does not show that the model uses it, and true here means only: "
        "as these short statements of common facts are true."
    )
    yield ("The subjects are ones that a small model knows something about; the accuracy says nothing of rarer facts.")
    yield (
        f"Layer {sweep.best_layer} was chosen on validation rows. The held-out accuracy of the other layers is shown "
        "for the shape of the curve; the largest of them is biased upwards."
    )
    yield (
        "The intervals are Wilson's and take the held-out statements as independent. Statements about the same "
        "entities resemble each other, so the true uncertainty is somewhat larger; a single subject has few."
    )
    stopped = [score.layer for score in sweep.layers if score.converged is False]
    if stopped:
        yield f"The solver stopped at its iteration limit at layers {', '.join(map(str, stopped))}."


def _facts(sweep: Sweep, statements: Statements, provenance: Provenance, pooling: str) -> Iterable[str]:
    split = sweep.split
    n_true, n_groups = int(statements.labels.sum()), len(set(statements.groups.tolist()))
    for name, value in (
        ("model", _short_name(provenance.model)),
        ("commit", provenance.commit),
        ("weights", _weights(provenance)),
        ("engine", f"{provenance.engine} {provenance.engine_version}".strip() + f" on {provenance.device}"),
        ("layers", f"{len(sweep.layers)} of {provenance.n_layers}, rows {provenance.hidden} wide"),
        ("pooling", pooling),
        ("statements", f"{len(statements)}: {n_true} true, {len(statements) - n_true} false, {n_groups} groups"),
        (
            "split",
            f"{len(split.train)} training, {len(split.validation)} validation, {len(split.test)} held-out "
            "statements; a group is never divided",
        ),
        ("classifier", f"{sweep.classifier}, random_state {sweep.random_state}"),
    ):
        yield f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>"


def _weights(provenance: Provenance) -> str:
    quantised = f", from {provenance.quantization}" if provenance.quantization else ""
    return f"{provenance.dtype}{quantised}"


def _row(name: str, *cells: str, chosen: bool = False) -> str:
    mark = ' class="chosen"' if chosen else ""
    values = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    return f'<tr{mark}><th scope="row">{escape(name)}</th>{values}</tr>'


def _range(ends: tuple[float, float]) -> str:
    return f"{ends[0]:.2f}–{ends[1]:.2f}"


def _short_name(model: str) -> str:
    """The model's name without folders that are nobody's business."""
    return Path(model).name if os.path.isabs(model) else model


def _embedded(picture: Path) -> str:
    content = picture.read_bytes()
    if not content.startswith(_PNG):
        raise InvalidInput(f"plot_png must be a PNG file; {picture.name} is not one.")
    return base64.b64encode(content).decode("ascii")


def _check_fits(sweep: Sweep, statements: Statements) -> None:
    split = sweep.split
    n_split = len(split.train) + len(split.validation) + len(split.test)
    if n_split != len(statements):
        raise InvalidInput(
            f"the sweep was made on {n_split} prompts, and there are {len(statements)} statements; "
            "pass the statements that it was made on."
        )
