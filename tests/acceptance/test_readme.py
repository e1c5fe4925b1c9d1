"""The samples of the README and the documentation run, as they stand, on the real model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
#: They need files that the reader has; tests/cache and tests/workbench/test_export.py read such files.
_ELSEWHERE = ("docs/cache.md", "docs/command-line.md")
#: Samples of theirs ask a server that the reader started.
_SERVED = ("docs/service.md", "docs/harvest.md")

pytestmark = pytest.mark.xdist_group("demo-model")


def _samples() -> list[object]:
    found = []
    for page in PAGES:
        name = page.relative_to(ROOT).as_posix()
        for number, code in enumerate(_FENCE.findall(page.read_text(encoding="utf-8"))):
            if name not in _ELSEWHERE:
                found.append(pytest.param(name, code, id=f"{name}:{number}"))
    return found


class Forks:
    """Runs programs as ``python FILE`` does, in forks of an interpreter that has imported what is slow to import."""

    def __init__(self, folder: Path, *modules: str) -> None:
        command = [sys.executable, str(Path(__file__).with_name("forks.py")), *modules]
        self.folder = folder
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, code: str, folder: Path, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
        process, program = self.process, self.folder / "sample.py"
        assert process.stdin is not None
        assert process.stdout is not None
        program.write_text(code, encoding="utf-8")
        told = {"folder": str(folder), "program": str(program), "variables": variables}
        process.stdin.write(json.dumps(told) + "\n")
        process.stdin.flush()
        status = int(process.stdout.readline())
        said = [(self.folder / name).read_text(encoding="utf-8") for name in ("out", "err")]
        return subprocess.CompletedProcess([str(program)], status, *said)


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    modules = ("streamtap.engines.transformers", "transformers.models.llama.modeling_llama")
    forks = Forks(tmp_path_factory.mktemp("forks"), *modules)
    yield forks
    forks.process.communicate()


@pytest.mark.parametrize(("page", "code"), _samples())
def test_sample_runs(page: str, code: str, forks: Forks, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    told = _address(request.getfixturevalue("demo_service")) if page in _SERVED else {}

    done = forks.run(code, tmp_path, told)

    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()


@pytest.mark.parametrize(
    ("code", "status", "said"), [("1 / 0", 1, "ZeroDivisionError"), ("raise SystemExit(3)", 3, ""), ("x = 1", 0, "")]
)
def test_a_sample_that_fails_would_be_seen(forks: Forks, tmp_path: Path, code: str, status: int, said: str) -> None:
    done = forks.run(code, tmp_path, {})

    assert (done.returncode, done.stdout) == (status, "")
    assert said in done.stderr


def _address(service: Any) -> dict[str, str]:
    return {"ACS_API_BASE": service.base_url, "ACS_API_KEY": service.key}


def test_readme_has_the_two_commands_and_a_sample() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")

    assert "make demo" in text
    assert "make test" in text
    assert _FENCE.search(text)
