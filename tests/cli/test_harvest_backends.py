"""``streamtap harvest run --backend``: what runs the model, and what it is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from streamtap.cli.main import main
from streamtap.engines import opening
from streamtap.engines.base import Engine
from streamtap.errors import InvalidInput
from streamtap.harvest import local
from streamtap.harvested.reader import HarvestedRun

PROMPTS = [f"The cat number {i} sat on the mat{'.' * (i % 5)}" for i in range(20)]


def _run(model: str, file: Path, *options: str, out: Path) -> Result:
    return CliRunner().invoke(main, ["harvest", "run", str(file), "--model", model, "--out", str(out), *options])


def test_the_backend_that_is_named_makes_the_rows(
    model: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def run_harvest(engine: Engine, *rest: Any, **named: Any) -> Any:
        ran.append(engine.provenance.engine)
        return wrapped(engine, *rest, **named)

    wrapped = local.run_harvest
    monkeypatch.setattr(local, "run_harvest", run_harvest)
    result = _run(model, file, "--backend", "nnsight", "--layers", "0,2", out=tmp_path / "there")
    _run(model, file, "--layers", "0,2", out=tmp_path / "here")

    assert result.exit_code == 0, result.output
    assert ran == ["nnsight", "transformers"]
    there, here = (HarvestedRun.open(tmp_path / name) for name in ("there", "here"))
    for i in range(20):
        for layer, rows in there.prompt(i).items():
            mine = here.prompt(i)[layer].astype(np.float32)
            assert np.allclose(rows.astype(np.float32), mine, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("words", "dtype"),
    [("", None), ("--dtype float32", "float32"), ("--dtype float32 --model-dtype bfloat16", "bfloat16")],
)
def test_a_service_is_asked_for_the_dtype_of_the_files(
    words: str, dtype: str | None, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def record(_model: str, **options: Any) -> None:
        asked.update(options)
        raise InvalidInput("enough.")

    monkeypatch.setattr(opening, "load_engine", record)
    _run("some/model", file, "--backend", "api", *words.split(), out=tmp_path / "run")

    assert asked == {"backend": "api", "dtype": dtype or "bfloat16"}
