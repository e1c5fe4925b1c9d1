from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import streamtap
from streamtap.cli import doctor as doctor_module
from streamtap.cli.doctor import LIBRARIES
from streamtap.cli.main import main
from streamtap.engines import demo_model

ROOT = Path(__file__).resolve().parents[2]


def _run(*options: str, cache: Path) -> Result:
    return CliRunner().invoke(main, ["doctor", *options], env={"STREAMTAP_CACHE_DIR": str(cache)})


def test_json_holds_versions_devices_and_places(tmp_path: Path) -> None:
    result = _run("--json", cache=tmp_path)

    found = json.loads(result.stdout)
    assert result.exit_code == 0
    assert found["streamtap"] == streamtap.__version__
    assert re.fullmatch(r"\d+\.\d+.*", found["libraries"]["numpy"])
    assert found["cores"] >= 1
    assert found["devices"][-1]["name"] == "cpu"
    assert found["cache"]["free_bytes"] > 0


def test_a_library_of_two_extras_is_listed_once(tmp_path: Path) -> None:
    assert len(re.findall(r"^  tokenizers ", _run(cache=tmp_path).stdout, re.MULTILINE)) == 1


def test_size_of_the_cache_is_that_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "rows").write_bytes(b"x" * 1500)
    (tmp_path / "index").write_bytes(b"x" * 500)

    assert json.loads(_run("--json", cache=tmp_path).stdout)["cache"]["size_bytes"] == 2000
    assert f"{tmp_path} (2.0 kB; " in _run(cache=tmp_path).stdout


def test_a_cache_that_is_not_there_yet_is_not_made(tmp_path: Path) -> None:
    result = _run(cache=tmp_path / "a" / "b")

    assert f"{tmp_path / 'a' / 'b'} (not made yet; " in result.stdout
    assert not (tmp_path / "a").exists()


def test_a_missing_library_comes_with_the_command_that_adds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LIBRARIES, "plots", ("no-such-library",))

    result = _run(cache=tmp_path)

    assert re.search(r"no-such-library +not installed: pip install 'streamtap\[plots\]'", result.stdout)
    assert re.search(r"plots +no\n", result.stdout)


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_module.os, "access", lambda path, mode: False)

    assert "not writable: set STREAMTAP_CACHE_DIR" in _run(cache=tmp_path).stdout


def test_the_demo_model_is_found_or_told_how_to_get(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "installed.gguf"
    monkeypatch.setattr(demo_model, "find_gguf", lambda settings: installed)
    assert json.loads(_run("--json", cache=tmp_path).stdout)["demo_model"] == {
        "found": True,
        "path": str(installed),
        "hint": None,
    }

    monkeypatch.undo()
    monkeypatch.setattr(demo_model, "_DISTRIBUTION", "no-such-distribution")
    assert re.search(
        r"demo model +the demo model is not on this machine; get it with: pip ", _run(cache=tmp_path).stdout
    )


def test_libraries_are_those_of_pyproject() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {"core": project["dependencies"], **project["optional-dependencies"]}

    def names(requirements: list[str]) -> set[str]:
        found = {re.match(r"[\w-]+", each)[0] for each in requirements}  # type: ignore[index]
        return found - {"streamtap"}

    assert {extra: set(libraries) for extra, libraries in LIBRARIES.items()} == {
        extra: names(declared[extra]) for extra in LIBRARIES
    }
    assert names(declared["all"]) == set()
    assert set(re.findall(r"\w+", declared["all"][0])) - {"streamtap"} == set(LIBRARIES) - {"core", "vllm"}
