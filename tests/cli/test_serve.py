"""`streamtap serve` up to the server; the server itself is in tests/server/test_running.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from streamtap.cli.main import main
from streamtap.server.running import Started


def _served(monkeypatch: pytest.MonkeyPatch, *arguments: str, first_key: str | None = None) -> tuple[Any, str, int]:
    """The configuration that would be served, what was printed, and the exit code."""
    found: list[Any] = []

    def serve(config: Any, *, say: Any, started: Any) -> None:
        found.append(config)
        say("unpacking")
        started(Started("http://127.0.0.1:1/v1", config, first_key))

    monkeypatch.setattr("streamtap.server.running.serve", serve)
    done = CliRunner().invoke(main, ["serve", *arguments])
    return (found[0] if found else None), done.output, done.exit_code


def test_without_anything_it_is_the_demo_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    config, output, code = _served(monkeypatch, first_key="stp_abc")

    assert code == 0
    assert [(model.id, model.checkpoint) for model in config.models] == [("demo", "demo")]
    assert (config.host, config.port) == ("127.0.0.1", 8000)
    assert "export ACS_API_BASE=http://127.0.0.1:1/v1" in output
    assert output.count("stp_abc") == 1


def test_a_key_is_shown_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    _config, output, _code = _served(monkeypatch)

    assert "stp_" not in output
    assert "streamtap keys create" in output


def test_models_and_places_of_the_command_line_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "streamtap.toml").write_text("port = 1234\n[limits]\nrate_per_minute = 5\n")
    arguments = ["--model", "org/big", "--as", "big", "--model", "org/small", "--host", "::1", "--data-dir", "there"]

    config, _output, code = _served(monkeypatch, *arguments)

    assert code == 0
    assert [(model.id, model.checkpoint) for model in config.models] == [("big", "org/big"), ("small", "org/small")]
    assert (config.host, config.port, config.limits.rate_per_minute) == ("::1", 1234, 5)
    assert config.data_dir.name == "there"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--as", "name"], "--as was given 1 times and --model 0 times"),
        (["--model", "a/x", "--as", "no spaces"], "expected 1 to 64 of A-Z"),
        (["--config", "missing.toml"], "missing.toml"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    config, output, code = _served(monkeypatch, *arguments)

    assert config is None
    assert code == 2
    assert said in output
    assert output.startswith("error: ")
