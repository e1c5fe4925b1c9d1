from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from streamtap.cli.main import main

FILE = """
database = "postgresql+psycopg://tap:hunter2@db/tap"
port = 8123
[limits]
monthly_activations = 5000
[[models]]
id = "own"
checkpoint = "weights"
max_activation_prompt_tokens = 64
idle_seconds = 0
[[models]]
id = "far"
checkpoint = "org/far"
engine = "url"
url = "http://far:8000"
activations = false
n_layers = 4
hidden_size = 8
max_model_len = 2048
vocabulary = 97
[[models]]
id = "hub"
checkpoint = "org/hub"
engine = "vllm"
arguments = ["--note", "two words"]
[[models]]
id = "asleep"
checkpoint = "org/hub"
engine = "vllm"
park = true
self_check = true
"""
CONFIG = {
    "num_hidden_layers": 3,
    "hidden_size": 8,
    "max_position_embeddings": 64,
    "vocab_size": 97,
    "dtype": "bfloat16",
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "streamtap.toml").write_text(FILE)
    return tmp_path / "streamtap.toml"


def _run(*arguments: str, cache: Path) -> Result:
    return CliRunner().invoke(
        main,
        ["check-config", *arguments],
        env={"STREAMTAP_CACHE_DIR": str(cache / "c"), "HF_HUB_CACHE": str(cache / "h")},
    )


def test_it_says_what_would_be_done(tmp_path: Path, file: Path) -> None:
    result = _run(str(file), cache=tmp_path)

    assert result.exit_code == 0, result.stderr
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    for expected in (
        str(file),
        "address http://127.0.0.1:8123/v1",
        "database postgresql+psycopg://tap:***@db/tap",
        f"data folder {tmp_path / 'streamtap-data'}",
        "engines one for completions, one for activations; at most 4 processes at a time",
        f"checkpoint {tmp_path / 'weights'} (answers call it weights)",
        "facts 3 layers of 8, context 64 tokens, vocabulary 97, bfloat16",
        "tokenizer none: prompts have to be token ids",
        "capture up to 64 positions of every layer",
        "when idle never stops",
        f"writes {tmp_path / 'streamtap-data' / 'logs' / 'own-activations.log'}",
        "completions runs at http://far:8000",
        "capture no",
        "facts config and tokenizer are fetched from the Hub at the first start",
        "when idle stops after 900 s",
        "when idle sleeps after 900 s, while the host has the memory",
        "self-check at each start, against the plain model in float32",
        "monthly_activations 5000",
        "keep_days 30",
        "max_body_bytes 52428800",
        "deadline_seconds 840",
        "daily_input_tokens 0",
    ):
        assert expected in lines, expected
    assert any(line.startswith(f"completions {sys.executable} -m streamtap.engines.worker --model") for line in lines)
    assert any(line.startswith("activations vllm serve org/hub") and "--note 'two words'" in line for line in lines)
    assert "hunter2" not in result.output


def test_nothing_is_made_or_fetched(tmp_path: Path, file: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert _run(str(file), cache=tmp_path).exit_code == 0
    assert sorted(tmp_path.rglob("*")) == before


def test_json_holds_the_same(tmp_path: Path, file: Path) -> None:
    told = json.loads(_run("--json", str(file), cache=tmp_path).stdout)

    assert [model["id"] for model in told["models"]] == ["own", "far", "hub", "asleep"]
    assert told["models"][0]["n_layers"] == 3
    assert told["models"][2]["n_layers"] is None
    assert set(told["models"][0]["engines"]) == {"completions", "activations"}
    assert "hunter2" not in json.dumps(told)


def test_without_a_file_it_is_the_demo_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    result = _run(cache=tmp_path)

    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("no configuration file: every default\n")
    assert "the demo model is unpacked at the first start" in result.stdout


def test_the_file_of_this_folder_is_found(tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "model far" in _run(cache=tmp_path).stdout
    monkeypatch.chdir("/")
    assert "model far" in _run("--config", str(file), cache=tmp_path).stdout


def test_a_wrong_file_is_one_sentence_and_status_2(tmp_path: Path, file: Path) -> None:
    file.write_text(FILE.replace("port = 8123", "prot = 8123"))

    result = _run(str(file), cache=tmp_path)

    assert result.exit_code == 2
    assert result.stderr == f"error: {file}, line 3: unknown key prot; did you mean port?\n"
    assert result.stdout == ""


def test_a_model_that_cannot_be_served_is_one_sentence_and_status_2(tmp_path: Path, file: Path) -> None:
    told = {
        FILE.replace(
            "vocabulary = 97\n", ""
        ): "model 'far': set vocabulary in its table; org/far is not on this machine",
        FILE.replace('"weights"', '"./nothing"'): "model 'own': model '",
    }
    for text, reason in told.items():
        file.write_text(text)

        result = _run(str(file), cache=tmp_path)

        assert result.exit_code == 2
        assert result.stderr.startswith(f"error: {reason}")
