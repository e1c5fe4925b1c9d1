from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, LlamaTokenizer

from streamtap.engines import saved_tokenizer
from streamtap.engines.demo_model import demo_folder
from streamtap.errors import EmptyPrompt, InvalidPrompt, SettingsError
from streamtap.server.config import ModelConfig
from streamtap.server.models.counting import TokenCounter
from streamtap.server.models.facts import ModelFacts, facts_of
from streamtap.settings import Settings
from streamtap.testing.tokenizers import tiny_tokenizer

TEXTS = [
    "The capital of France is",
    " a",
    "a",
    "<s>a</s>",
    "line\nline\n\n",
    "été 你好 \U0001f600",
    "  two  spaces ",
    "<b>",
]


def _saved(folder: Path, *, adds_bos: bool = True, **config: Any) -> Path:
    tiny_tokenizer(adds_bos=adds_bos).save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return folder


def _counter(folder: Path | None) -> TokenCounter:
    facts = ModelFacts(2, 8, 64, 97, None, "org/model", folder and folder / "tokenizer.json")
    return TokenCounter(facts)


def _assert_equal_to_transformers(folder: Path) -> None:
    counter, theirs = _counter(folder), AutoTokenizer.from_pretrained(str(folder))
    for text in TEXTS:
        for special in (True, False):
            expected = list(theirs(text, add_special_tokens=special)["input_ids"])
            assert counter.encode(text, special) == expected, (text, special)
            assert counter.count(text, special) == len(expected)


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}, {"add_bos_token": False, "add_eos_token": True}])
def test_ids_are_those_of_transformers(tmp_path: Path, adds_bos: bool, config: dict[str, Any]) -> None:
    _assert_equal_to_transformers(_saved(tmp_path, adds_bos=adds_bos, **config))


def test_special_tokens_that_only_the_config_names_count_as_one(tmp_path: Path) -> None:
    _saved(tmp_path, extra_special_tokens=["<b>"], cls_token={"content": "<c>", "__type": "AddedToken"})
    _assert_equal_to_transformers(tmp_path)
    assert len(_counter(tmp_path).encode("<b>", False)) == 1


def test_ids_of_a_class_that_ignores_its_file_are_those_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_tokenizer.subprocess, "run", _run_here)
    folder = _like_llama_2(tmp_path / "model")
    settings = Settings(cache_dir=tmp_path / "cache", hub_cache_dir=tmp_path / "hub")
    said: list[str] = []
    facts = [facts_of(ModelConfig(id="m", checkpoint=str(folder)), settings, said.append) for _ in range(2)]

    theirs = AutoTokenizer.from_pretrained(str(folder))
    expected = [list(theirs(text)["input_ids"]) for text in TEXTS]
    assert [TokenCounter(facts[1]).encode(text) for text in TEXTS] == expected
    assert facts[0] == facts[1]
    assert [_counter(folder).encode(text) for text in TEXTS] != expected
    assert said == [f"reading the tokenizer of {folder}"] * 2


def _run_here(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
    """The child in this process, where transformers is loaded already, which takes a child ten seconds."""
    assert command[:3] == [sys.executable, "-m", "streamtap.engines.saved_tokenizer"]
    saved_tokenizer._main(*command[3:])
    return subprocess.CompletedProcess(command, 0, "", "")


def _like_llama_2(folder: Path) -> Path:
    """A tokenizer whose class puts its own rule for leading spaces in place of that of tokenizer.json."""
    tokens = ["<unk>", "<s>", "</s>", "▁", *(chr(code) for code in range(33, 127))]
    LlamaTokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=[]).save_pretrained(folder)
    file = folder / "tokenizer.json"
    rules = json.loads(file.read_text())
    prepend = {"type": "Prepend", "prepend": "▁"}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    rules |= {"normalizer": {"type": "Sequence", "normalizers": [prepend, replace]}, "pre_tokenizer": None}
    file.write_text(json.dumps(rules))
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "max_position_embeddings": 64, "vocab_size": 98}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    return folder


@pytest.mark.xdist_group("demo-model")
def test_ids_of_the_demo_model_are_those_of_transformers() -> None:
    _assert_equal_to_transformers(demo_folder(Settings.from_environment()))


def test_settings_for_batches_do_not_leak_in(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(5)
    tokenizer.backend_tokenizer.enable_padding(length=9)
    tokenizer.backend_tokenizer.save(str(tmp_path / "tokenizer.json"))

    assert _counter(tmp_path).count("a") == 2
    assert _counter(tmp_path).count("a" * 20) == 21


def test_ids_are_taken_as_they_are() -> None:
    assert _counter(None).encode((0, 96, 5)) == [0, 96, 5]


@pytest.mark.parametrize("bad", [97, -1])
def test_an_id_outside_the_vocabulary_is_named(bad: int) -> None:
    with pytest.raises(InvalidPrompt, match=f"prompt 3 holds token id {bad}; the vocabulary is 0 to 96") as caught:
        _counter(None).count((1, bad), index=3)
    assert caught.value.index == 3


def test_a_prompt_without_a_token_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EmptyPrompt, match="prompt 0 has no token"):
        _counter(None).count(())
    with pytest.raises(EmptyPrompt):
        _counter(_saved(tmp_path, adds_bos=False)).count("")


def test_half_a_surrogate_pair_is_refused_without_quoting_it(tmp_path: Path) -> None:
    with pytest.raises(InvalidPrompt, match="prompt 1 holds half a surrogate pair at character 6") as caught:
        _counter(_saved(tmp_path)).count("secret\ud800", index=1)
    assert "secret" not in str(caught.value)


def test_text_needs_a_tokenizer() -> None:
    with pytest.raises(
        InvalidPrompt, match="prompt 2 is text, but there is no tokenizer of org/model here; send token ids"
    ):
        _counter(None).count("a", index=2)


@pytest.mark.parametrize("text", ["", "[]", "{}"])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)

    with pytest.raises(SettingsError, match="tokenizer.json"):
        _counter(tmp_path)


def test_many_threads_count_alike(tmp_path: Path) -> None:
    counter = _counter(_saved(tmp_path))
    with ThreadPoolExecutor(8) as threads:
        counts = list(threads.map(counter.count, ["x" * length for length in range(200)]))
    assert counts == [length + 1 for length in range(200)]


def test_a_long_text_holds_nobody_up(tmp_path: Path) -> None:
    counter = _counter(_saved(tmp_path))
    text = "a text that goes on and on " * 50_000

    with ThreadPoolExecutor(1) as pool:
        counting, turns = pool.submit(counter.count, text), 0
        while not counting.done():
            time.sleep(0.001)
            turns += 1

    assert counting.result() == len(text) + 1
    assert turns > 10, "another thread goes on meanwhile"
