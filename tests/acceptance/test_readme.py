"""The samples of the README and the documentation run, as they stand, on the real model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
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


@pytest.mark.parametrize(("page", "code"), _samples())
def test_sample_runs(page: str, code: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    told = _address(request.getfixturevalue("demo_service")) if page in _SERVED else {}
    command = [sys.executable, "-c", code]
    variables = {**os.environ, **told}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=variables)

    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()


def _address(service: Any) -> dict[str, str]:
    return {"ACS_API_BASE": service.base_url, "ACS_API_KEY": service.key}


def test_readme_has_the_two_commands_and_a_sample() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")

    assert "make demo" in text
    assert "make test" in text
    assert _FENCE.search(text)
