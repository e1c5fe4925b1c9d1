from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from streamtap.cli.main import main
from streamtap.server.db import Database
from streamtap.server.ledger.keys import known_key


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "streamtap-data"


def _run(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["keys", *arguments])
    assert result.exit_code == code, result.output
    return result


def _listed() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(_run("list", "--json").stdout)
    return found


def test_a_key_is_made_and_shown_once(folder: Path) -> None:
    shown = _run(
        "create",
        "--name",
        "ada",
        "--user",
        "ada@lab",
        "--scopes",
        "completions,harvest",
        "--monthly-activations",
        "5000",
        "--monthly-harvests",
        "7",
    ).stdout

    secret = shown.splitlines()[0]
    assert "not shown again" in shown
    database = Database.open(f"sqlite:///{folder / 'streamtap.db'}")
    with database.reading() as connection:
        key = known_key(connection, secret)
    database.close()
    assert (key.name, key.user, key.scopes) == ("ada", "ada@lab", ("completions", "harvest"))
    assert (key.limits.monthly_activations, key.limits.monthly_harvests) == (5000, 7)
    table, entries = _run("list").stdout, _run("list", "--json").stdout
    assert secret not in table + entries
    assert key.prefix in table
    assert "monthly_activations 5000" in table


def test_quiet_prints_the_key_alone(folder: Path) -> None:
    lines = _run("create", "--name", "ada", "--quiet").stdout.splitlines()

    assert len(lines) == 1
    assert lines[0].startswith(_listed()[0]["prefix"])


def test_keys_are_paused_resumed_changed_and_revoked(folder: Path) -> None:
    _run("create", "--name", "ada", "--daily-output-tokens", "7")
    prefix = _listed()[0]["prefix"]

    assert f"ada ({prefix}) of ada is paused" in _run("pause", "ada").stdout
    assert "is active" in _run("resume", prefix).stdout
    changed = _run("set", "ada", "--scopes", "admin", "--max-active", "3", "--daily-output-tokens", "default").stdout
    assert "scopes admin; max_active 3." in changed
    assert "is revoked" in _run("revoke", "ada").stdout
    assert [key["state"] for key in _listed()] == ["revoked"]
    assert _listed()[0]["limits"]["daily_output_tokens"] is None


def test_the_database_is_the_one_that_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text(f'data_dir = "{tmp_path}/elsewhere"\n')

    _run("create", "--name", "ada", "--data-dir", str(tmp_path / "here"))
    _run("create", "--name", "bo", "--config", str(tmp_path / "other.toml"))

    assert not folder.exists()
    assert (tmp_path / "here" / "streamtap.db").is_file()
    assert "bo" in _run("list", "--data-dir", str(tmp_path / "elsewhere")).stdout
    assert "there are no keys" in _run("list").stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("create", "--name", "ada", "--scopes", "root"), "error: scopes must be one or more of"),
        (("create", "--name", ""), "error: a key's name must be"),
        (("create", "--name", "ada", "--max-active", "many"), "'many' is no limit"),
        (("create", "--name", "ada", "--max-active", "-1"), "'-1' is no limit"),
        (("create", "--name", "ada", "--max-active", "0"), "error: max_active must be 1 to"),
        (("create",), "Missing option '--name'"),
        (("pause", "nobody"), "error: there is no key 'nobody'"),
        (("set", "nobody"), "error: nothing to change was given"),
        (("list", "--config", "none.toml"), "none.toml"),
    ],
)
def test_what_cannot_be_is_one_sentence_and_exit_code_2(folder: Path, arguments: tuple[str, ...], said: str) -> None:
    assert said in _run(*arguments, code=2).stderr
