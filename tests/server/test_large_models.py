"""``deploy/large-models.md`` can be believed: its sums come out, and its configurations are ones."""

from __future__ import annotations

import ast
import json
import operator
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from streamtap.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "deploy" / "large-models.md").read_text(encoding="utf-8")
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SUMS = [line for kind, body in _FENCE.findall(PAGE) if kind == "sums" for line in body.splitlines()]
FILES = [body for kind, body in _FENCE.findall(PAGE) if kind == "toml"]

_UNITS = {"GB": 1e9, "MB": 1e6, "": 1.0}
_OPERATORS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}


def worked_out(text: str) -> float:
    """The value of a sum of plain numbers."""

    def value(node: ast.expr) -> float:
        if isinstance(node, ast.BinOp):
            return float(_OPERATORS[type(node.op)](value(node.left), value(node.right)))
        assert isinstance(node, ast.Constant), text
        return float(node.value)

    return value(ast.parse(text.replace("×", "*").replace("^", "**"), mode="eval").body)


def is_right(line: str) -> bool:
    """Whether what stands behind the last ``=`` is what stands before it, to the last digit that is shown."""
    _, _, rest = line.rpartition(": ")
    left, _, shown = rest.partition(" = ")
    found = re.fullmatch(r"([\d ]+(?:\.(\d+))?) ?(GB|MB)?", shown)
    assert found is not None, line
    digits, unit = len(found[2] or ""), _UNITS[found[3] or ""]
    return abs(worked_out(left) / unit - float(found[1].replace(" ", ""))) <= 0.5 * 10**-digits + 1e-9


@pytest.mark.parametrize("line", SUMS, ids=range(len(SUMS)))
def test_every_sum_comes_out(line: str) -> None:
    assert is_right(line)


@pytest.mark.parametrize(
    ("line", "right"),
    [
        ("a: 2 × 3 = 6", True),
        ("a, b: 10^12 = 1 000.0 GB", True),
        ("a: 2 × 3 = 7", False),
        ("a: 7 / 2 = 3.4", False),
    ],
)
def test_a_wrong_sum_is_seen(line: str, right: bool) -> None:
    assert is_right(line) == right


def _checked(text: str, folder: Path) -> dict[str, Any]:
    (folder / "streamtap.toml").write_text(text)
    environ = {"STREAMTAP_CACHE_DIR": str(folder / "cache"), "HF_HUB_CACHE": str(folder / "hub")}
    done = CliRunner().invoke(main, ["check-config", str(folder / "streamtap.toml"), "--json"], env=environ)
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.output)
    return found


@pytest.mark.parametrize("text", FILES, ids=range(len(FILES)))
def test_every_configuration_is_one_engine_of_one_model(text: str, tmp_path: Path) -> None:
    found = _checked(text, tmp_path)
    (model,) = found["models"]
    assert found["engines"] == "shared"
    assert model["size"] == "large"
    assert model["max_activation_prompt_tokens"] == 256
    (engine,) = model["engines"].values()
    command = json.dumps(engine)
    assert "http://10.0.0.1:8100" in command or "--tensor-parallel-size 8" in command


def test_two_machines_are_two_stages_under_ray(tmp_path: Path) -> None:
    texts = [text for text in FILES if "distributed_executor" in text]
    assert texts
    for text in texts:
        command = json.dumps(_checked(text, tmp_path)["models"][0]["engines"])
        assert "--pipeline-parallel-size 2" in command
        assert "--distributed-executor-backend ray" in command


def test_the_files_beside_it_lead_to_it() -> None:
    assert "(large-models.md)" in (ROOT / "deploy" / "README.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", PAGE):
        assert (ROOT / "deploy" / target).exists(), target
