from __future__ import annotations

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

import streamtap
from streamtap.cli import main as main_module
from streamtap.cli.main import COMMANDS, main
from streamtap.errors import InvalidLayers, NotCached, Unsupported


def _raising(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    @click.command()
    def broken() -> None:
        raise error

    monkeypatch.setitem(COMMANDS, "broken", "streamtap.cli.broken")
    monkeypatch.setattr(main_module, "import_module", lambda name: type("Home", (), {"broken": broken}))


def test_help_lists_every_command() -> None:
    result = CliRunner().invoke(main, ["--help"])

    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.split("Commands:")[1].strip().splitlines()] == sorted(COMMANDS)


def test_version_is_the_packages() -> None:
    assert CliRunner().invoke(main, ["--version"]).stdout == f"streamtap, version {streamtap.__version__}\n"


def test_python_dash_m_is_the_same_program() -> None:
    done = subprocess.run([sys.executable, "-m", "streamtap", "--version"], capture_output=True, text=True, check=True)

    assert done.stdout == f"streamtap, version {streamtap.__version__}\n"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (NotCached("3 of 5 prompts\nare not cached."), 1, "error: 3 of 5 prompts are not cached.\n"),
        (InvalidLayers("layer 40 is not in the model."), 2, "error: layer 40 is not in the model.\n"),
        (Unsupported("vLLM draws at least one token."), 2, "error: vLLM draws at least one token.\n"),
        (
            FileNotFoundError(2, "No such file or directory", "rows.csv"),
            1,
            "error: No such file or directory: rows.csv\n",
        ),
    ],
)
def test_an_error_is_one_sentence_and_an_exit_code(
    error: Exception, code: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _raising(monkeypatch, error)

    result = CliRunner().invoke(main, ["broken"])

    assert (result.exit_code, result.stderr, result.stdout) == (code, said, "")


def test_a_fault_of_ours_shows_neither_traceback_nor_message(monkeypatch: pytest.MonkeyPatch) -> None:
    _raising(monkeypatch, KeyError("a prompt that nobody should read in a log"))

    result = CliRunner().invoke(main, ["broken"])

    assert result.exit_code == 1
    assert result.stderr.startswith("error: unexpected KeyError; run `streamtap --debug")
    assert "prompt" not in result.stderr


def test_debug_lets_the_error_through(monkeypatch: pytest.MonkeyPatch) -> None:
    error = NotCached("3 of 5 prompts are not cached.")
    _raising(monkeypatch, error)

    assert CliRunner().invoke(main, ["--debug", "broken"]).exception is error


def test_an_unknown_command_is_refused() -> None:
    result = CliRunner().invoke(main, ["trace"])

    assert result.exit_code == 2
    assert "No such command 'trace'" in result.stderr
