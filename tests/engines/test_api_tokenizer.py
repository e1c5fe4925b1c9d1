"""A tokenizer that was opened once by a process of its own: it says what transformers' own says."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamtap.engines import api_tokenizer as module
from streamtap.engines.api_tokenizer import KeptTokenizer, kept_tokenizer
from streamtap.engines.demo_model import demo_folder
from streamtap.engines.generation.text import token_text
from streamtap.engines.references import ModelReference, find_model
from streamtap.engines.tokenizer_files import load_tokenizer
from streamtap.engines.tokenizing import PromptTokenizer
from streamtap.errors import InvalidInput, MissingExtra
from streamtap.settings import Settings
from streamtap.spec import CaptureSpec, Prompt
from streamtap.testing.tokenizers import tiny_tokenizer

TEXTS = ["a cat sat.", "", " leading", "<s> and </s>", "two\nlines", "über 100 €", "<|im_start|>user\nhi<|im_end|>"]
CHAT = Prompt(messages=(("user", "hello"), ("assistant", "hello to you"), ("user", "bye")))


def _named(folder: Path, settings: Settings) -> ModelReference:
    return find_model(str(folder), settings=settings, recall=lambda _key: {"commit": "sha256:"})


@pytest.fixture(scope="module", params=["tiny", "demo"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Ours, and transformers'."""
    settings = Settings.from_environment()
    if request.param == "demo":
        folder = demo_folder(settings)
    else:
        folder = tmp_path_factory.mktemp("checkpoint")
        tiny_tokenizer().save_pretrained(folder)
        (folder / "config.json").write_text("{}")
    reference = _named(folder, settings)
    return kept_tokenizer(reference, settings), load_tokenizer(reference)


@pytest.mark.parametrize("special", [True, False])
def test_texts_have_the_same_tokens(both: tuple[Any, Any], special: bool) -> None:
    assert isinstance(both[0], KeptTokenizer)
    for texts in (TEXTS, *TEXTS):
        found, expected = (
            each(texts, add_special_tokens=special, return_offsets_mapping=True, verbose=False) for each in both
        )
        assert found["input_ids"] == expected["input_ids"]
        assert found["offset_mapping"] == [
            list(map(tuple, each)) if isinstance(texts, list) else each for each in expected["offset_mapping"]
        ]


def test_ids_say_the_same(both: tuple[Any, Any]) -> None:
    ours, right = both
    ids = right("a cat <s> sat. 100 €")["input_ids"] + right.all_special_ids

    for skip in (True, False):
        said = right.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert ours.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False) == said
    assert [token_text(ours, token) for token in ids] == [token_text(right, token) for token in ids]
    assert ours.convert_ids_to_tokens(10**6) is None
    assert len(ours) == len(right)


def test_special_tokens_are_the_same(both: tuple[Any, Any]) -> None:
    ours, right = both

    assert ours.all_special_ids == right.all_special_ids
    assert ours.bos_token_id == right.bos_token_id


def test_chats_are_rendered_alike(both: tuple[Any, Any]) -> None:
    ours, right = (PromptTokenizer(each) for each in both)

    for positions in ("all", "role:assistant"):
        spec = CaptureSpec(positions=positions, generation_prompt=True)
        (found,), (expected,) = (each.encode([CHAT], spec) for each in (ours, right))
        assert found.token_ids.tolist() == expected.token_ids.tolist()
        assert (found.positions is None) == (positions == "all")
        if found.positions is not None:
            np.testing.assert_array_equal(found.positions, expected.positions)


def test_it_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(cache_dir=tmp_path / "cache", hub_cache_dir=tmp_path / "hub")
    (tmp_path / "checkpoint").mkdir()
    tiny_tokenizer().save_pretrained(tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "config.json").write_text("{}")
    reference = _named(tmp_path / "checkpoint", settings)
    first = kept_tokenizer(reference, settings)
    monkeypatch.setattr(module, "_make", None)

    again = kept_tokenizer(reference, settings)

    assert again("abc")["input_ids"] == first("abc")["input_ids"]
    assert [each.name for each in (tmp_path / "cache" / "tokenizers").iterdir()] != []


def test_what_is_kept_of_a_batch_cuts_no_prompt(tmp_path: Path) -> None:
    settings = Settings(cache_dir=tmp_path / "cache", hub_cache_dir=tmp_path / "hub")
    tokenizer = tiny_tokenizer()
    tokenizer("abc", truncation=True, max_length=2, padding="max_length")
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert json.loads((tmp_path / "tokenizer.json").read_text())["truncation"] is not None

    found = kept_tokenizer(_named(tmp_path, settings), settings)

    assert len(found("a long text")["input_ids"]) == 12


def test_a_model_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    settings = Settings(cache_dir=tmp_path / "cache", hub_cache_dir=tmp_path / "hub")
    (tmp_path / "config.json").write_text("{}")

    assert kept_tokenizer(_named(tmp_path, settings), settings) is None


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    settings = Settings(cache_dir=tmp_path / "cache", hub_cache_dir=tmp_path / "hub")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_text("no JSON")

    with pytest.raises(InvalidInput, match="tokenizer of .* could not be read"):
        kept_tokenizer(_named(tmp_path, settings), settings)
    assert not list((tmp_path / "cache" / "tokenizers").iterdir())


def test_without_the_library_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(cache_dir=tmp_path / "cache", hub_cache_dir=tmp_path / "hub")
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    reference = _named(tmp_path, settings)
    monkeypatch.setitem(sys.modules, "tokenizers", None)

    with pytest.raises(MissingExtra, match=r"pip install 'streamtap\[local\]'"):
        kept_tokenizer(reference, settings)
