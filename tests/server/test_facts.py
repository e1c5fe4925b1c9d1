from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from streamtap.engines import saved_tokenizer
from streamtap.errors import InvalidInput, SettingsError
from streamtap.server.config import ModelConfig
from streamtap.server.models.facts import ModelFacts, facts_of
from streamtap.settings import Settings

LLAMA = {"num_hidden_layers": 3, "hidden_size": 8, "max_position_embeddings": 64, "vocab_size": 97, "dtype": "float32"}
TOLD: dict[str, Any] = {"n_layers": 4, "hidden_size": 8, "max_model_len": 2048, "vocabulary": 97}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(cache_dir=tmp_path / "cache", hub_cache_dir=tmp_path / "hub")


def _folder(tmp_path: Path, config: object, *more: str) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for name in more:
        (folder / name).write_text("{}")
    return folder


def _facts(folder: Path, settings: Settings, **fields: Any) -> ModelFacts:
    return facts_of(ModelConfig(id="m", checkpoint=str(folder), **fields), settings)


def test_a_config_says_it_all(tmp_path: Path, settings: Settings) -> None:
    folder = _folder(tmp_path, LLAMA, "tokenizer.json")

    assert _facts(folder, settings, name="org/model") == ModelFacts(
        n_layers=3,
        hidden=8,
        max_model_len=64,
        vocabulary=97,
        dtype="float32",
        checkpoint="org/model",
        tokenizer_file=folder / "tokenizer.json",
    )


@pytest.mark.parametrize(
    "config",
    [
        {"n_layer": 3, "n_embd": 8, "n_positions": 64, "vocab_size": 97, "torch_dtype": "float32"},
        {"vision_config": {"num_hidden_layers": 9, "hidden_size": 9}, "text_config": LLAMA},
        {"dtype": "float32", "vocab_size": 5, "text_config": {key: LLAMA[key] for key in LLAMA if key != "dtype"}},
        {
            "num_hidden_layers": None,
            "n_layers": 3,
            "d_model": 8,
            "max_seq_len": 64,
            "vocab_size": 97,
            "dtype": "float32",
        },
    ],
)
def test_other_names_and_nested_configs_are_known(tmp_path: Path, settings: Settings, config: object) -> None:
    facts = _facts(_folder(tmp_path, config), settings)

    found = (facts.n_layers, facts.hidden, facts.max_model_len, facts.vocabulary, facts.dtype, facts.tokenizer_file)
    assert found == (3, 8, 64, 97, "float32", None)


def test_what_the_table_says_wins(tmp_path: Path, settings: Settings) -> None:
    facts = _facts(_folder(tmp_path, LLAMA), settings, max_model_len=32, dtype="bfloat16")

    assert (facts.max_model_len, facts.dtype, facts.n_layers) == (32, "bfloat16", 3)


def test_a_model_that_is_told_whole_needs_no_files(tmp_path: Path, settings: Settings) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    for tokenizer in (tmp_path, tmp_path / "tokenizer.json"):
        facts = facts_of(ModelConfig(id="m", checkpoint="./not-here", tokenizer=tokenizer, **TOLD), settings)
        assert facts.tokenizer_file == tmp_path / "tokenizer.json"
    assert facts_of(ModelConfig(id="m", checkpoint="org/far", **TOLD), settings).tokenizer_file is None


@pytest.mark.parametrize("lacks", list(LLAMA)[:4])
def test_a_fact_that_nothing_tells_is_asked_for(tmp_path: Path, settings: Settings, lacks: str) -> None:
    folder = _folder(tmp_path, {key: value for key, value in LLAMA.items() if key != lacks})

    with pytest.raises(
        SettingsError, match="model 'm': set [a-z_]+ in its table; .* is a checkpoint whose config.json"
    ):
        _facts(folder, settings)


def test_a_remote_model_and_a_gguf_file_have_to_be_told(tmp_path: Path, settings: Settings) -> None:
    remote = ModelConfig(id="m", checkpoint="org/far", engine="url", url="http://h", n_layers=4)
    with pytest.raises(
        SettingsError, match="set hidden_size, max_model_len, vocabulary in its table; org/far is not on"
    ):
        facts_of(remote, settings)
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(SettingsError, match="set n_layers, .* is a GGUF file, which is not read here"):
        _facts(tmp_path / "a.gguf", settings)


def test_a_wrong_checkpoint_is_named(tmp_path: Path, settings: Settings) -> None:
    with pytest.raises(InvalidInput, match="model 'm': model './no/model' is neither a folder, a GGUF file nor"):
        facts_of(ModelConfig(id="m", checkpoint="./no/model"), settings)
    for text in ("{", "[]"):
        folder = tmp_path / f"damaged{len(text)}"
        folder.mkdir()
        (folder / "config.json").write_text(text)
        with pytest.raises(InvalidInput, match="config.json .*; is the checkpoint whole?"):
            _facts(folder, settings)


def test_a_tokenizer_of_another_kind_needs_transformers(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _folder(tmp_path, LLAMA, "tokenizer.model")
    _make_children_fail(tmp_path, monkeypatch)
    with pytest.raises(InvalidInput, match="the tokenizer of .* could not be read: no room for "):
        _facts(folder, settings)
    assert list((settings.cache_dir / "tokenizers").iterdir()) == []
    assert facts_of(ModelConfig(id="m", checkpoint=str(folder)), settings, exact=False).tokenizer_file is None

    monkeypatch.setattr(saved_tokenizer.importlib.metadata, "version", _not_installed)
    with pytest.raises(
        SettingsError, match="model 'm': there is no tokenizer.json beside .*; set tokenizer to a folder"
    ):
        _facts(folder, settings)


def _not_installed(name: str) -> str:
    raise PackageNotFoundError(name)


def test_a_model_of_the_hub_that_is_not_here_is_fetched_or_named(settings: Settings) -> None:
    said: list[str] = []

    with pytest.raises(InvalidInput, match="model 'm': 'org/far' is not on this machine and could not be fetched"):
        facts_of(ModelConfig(id="m", checkpoint="org/far"), settings, said.append)
    assert said == ["fetching config and tokenizer of org/far from the Hub"]


def test_a_demo_model_that_cannot_be_unpacked_says_why(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said: list[str] = []
    settings.models_dir.mkdir(parents=True)
    (settings.models_dir / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"nothing of use")
    _make_children_fail(tmp_path, monkeypatch)

    with pytest.raises(InvalidInput, match=f"the demo model could not be unpacked: no room for {settings.cache_dir}"):
        facts_of(ModelConfig(id="demo", checkpoint="demo"), settings, said.append)
    assert said == ["unpacking the demo model; this happens once and takes about half a minute"]


def _make_children_fail(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = folder / "python"
    child.write_text("#!/bin/sh\necho noise >&2\necho no room for $3 >&2\nexit 1\n")
    child.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(child))


def test_facts_and_counts_load_no_torch(tmp_path: Path) -> None:
    folder = _folder(tmp_path, LLAMA)
    code = (
        "import sys; from pathlib import Path\n"
        "from streamtap.settings import Settings\n"
        "from streamtap.server.config import ModelConfig\n"
        "from streamtap.server.models.counting import TokenCounter\n"
        "from streamtap.server.models.facts import facts_of\n"
        f"facts = facts_of(ModelConfig(id='m', checkpoint={str(folder)!r}), Settings(Path('c'), Path('h')))\n"
        "assert TokenCounter(facts).count((1, 2)) == 2\n"
        "assert not {'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)\n"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
