from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamtap.engines import self_check_reference as made
from streamtap.engines.references import find_model
from streamtap.engines.self_check_reference import (
    Reference,
    keep_reference,
    make_reference,
    read_reference,
    reference_file,
    reference_for,
    reference_ids,
    write_reference,
)
from streamtap.engines.tokenizing import PromptTokenizer
from streamtap.errors import EngineFailed, InvalidInput
from streamtap.settings import Settings
from streamtap.tensor_file import tensor_bytes
from streamtap.testing.models import tiny_model
from streamtap.testing.reference import plain_rows
from streamtap.testing.tokenizers import tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch

    folder = tmp_path_factory.mktemp("reference") / "tiny"
    tiny_model("llama", dtype=torch.bfloat16).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(cache_dir=tmp_path / "cache", hub_cache_dir=tmp_path / "hub")


@pytest.fixture
def never(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process may be started."""

    def run(*_arguments: Any, **_options: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "run", run)


def test_it_is_the_plain_model_in_float32(folder: Path, settings: Settings) -> None:
    from transformers import AutoModelForCausalLM

    reference = make_reference(str(folder), settings=settings)

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    right = plain_rows(model, reference.token_ids.tolist())
    np.testing.assert_allclose(
        reference.rows, np.stack([right[layer].numpy() for layer in sorted(right)]), rtol=1e-5, atol=1e-5
    )
    assert reference.rows.dtype == np.float32
    assert reference.shape == (3, 32)
    assert reference.commit.startswith("sha256:")
    assert reference.made_by.startswith("streamtap ")


def test_it_is_made_in_another_process_once_and_then_kept(
    folder: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    first = reference_for(str(folder), settings=settings, say=said.append)

    assert len(said) == 1
    monkeypatch.setattr(subprocess, "run", None)
    # The weights are not read again either, not even for their hash.
    monkeypatch.setattr("streamtap.engines.references.content_hash", _only_of_tokenizers)
    second = reference_for(str(folder), settings=settings, say=said.append)
    assert len(said) == 1
    np.testing.assert_array_equal(first.rows, second.rows)
    np.testing.assert_array_equal(first.token_ids, make_reference(str(folder), settings=settings).token_ids)
    names = sorted(file.suffix for file in (settings.cache_dir / "self-check").iterdir())
    assert names == [".json", ".safetensors"]


def _only_of_tokenizers(files: list[Path]) -> str:
    from streamtap.fingerprint import content_hash

    assert all("token" in file.name or "template" in file.name for file in files)
    return content_hash(files)


def test_to_look_for_a_kept_one_needs_no_torch(folder: Path, settings: Settings) -> None:
    keep_reference(_any(folder), str(folder), settings=settings)
    code = (
        "import sys; from pathlib import Path; from streamtap.settings import Settings; "
        "from streamtap.engines.self_check_reference import reference_for; import streamtap.engines.self_check; "
        f"s = Settings(cache_dir=Path({str(settings.cache_dir)!r}), hub_cache_dir=Path('/nowhere')); "
        f"print(reference_for({str(folder)!r}, settings=s).shape, {{'torch', 'transformers'}} & set(sys.modules))"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "(3, 32) set()\n"


def _any(folder: Path) -> Reference:
    """One that can be of the model in ``folder``, by all that tells one model from another."""
    commit = find_model(str(folder), settings=Settings.from_environment()).commit or ""
    return Reference(np.ones((3, 5, 32), np.float32), np.arange(5, dtype=np.int32), "org/x", commit, "by hand")


def test_another_model_tokenizer_or_version_is_another_reference(
    folder: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def file() -> Path:
        return reference_file(made._found(str(other), None, settings), settings)

    other = tmp_path / "other"
    tiny_model("llama", seed=1).save_pretrained(other)
    names = [file()]
    tiny_tokenizer().save_pretrained(other)
    names.append(file())
    tiny_model("llama", seed=2).save_pretrained(other)
    names.append(file())
    monkeypatch.setattr(made, "_version", lambda library: f"{library}-99")
    names.append(file())

    assert len(set(names)) == 4


@pytest.mark.usefixtures("never")
def test_one_that_was_made_elsewhere_is_kept(folder: Path, settings: Settings, tmp_path: Path) -> None:
    file = tmp_path / "there.safetensors"
    there = _any(folder)
    write_reference(there, file)

    keep_reference(read_reference(file), str(folder), settings=settings)

    found = reference_for(str(folder), settings=settings)
    np.testing.assert_array_equal(found.rows, there.rows)
    assert (found.model, found.commit, found.made_by) == ("org/x", there.commit, "by hand")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"commit": "sha256:1"}, r"its commit is sha256:1, the model's is sha256:[0-9a-f]{64}; make one"),
        ({"rows": np.ones((2, 5, 32), np.float32)}, "its depth is 2, the model's is 3; make one"),
        ({"rows": np.ones((3, 5, 64), np.float32)}, "its width is 64, the model's is 32; make one"),
    ],
)
def test_another_models_reference_is_not_kept(
    folder: Path, settings: Settings, changed: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidInput, match=rf"made of org/x, is not of {folder}: {said}"):
        keep_reference(replace(_any(folder), **changed), str(folder), settings=settings)

    assert not list(settings.cache_dir.glob("self-check/*.safetensors"))


def test_a_kept_one_that_is_damaged_is_made_again(
    folder: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = keep_reference(_any(folder), str(folder), settings=settings)
    asked: list[str] = []

    def make(model: str, _revision: str | None, file: Path, _settings: Settings) -> None:
        asked.append(model)
        write_reference(_any(folder), file)

    monkeypatch.setattr(made, "_make_elsewhere", make)
    for raw in (kept.read_bytes()[:-4], b"", b"nonsense"):
        kept.write_bytes(raw)
        reference_for(str(folder), settings=settings)
        reference_for(str(folder), settings=settings)

    assert asked == [str(folder)] * 3


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"rows": np.ones((2, 3, 4), np.float32)},
        {"rows": np.ones((2, 3, 4), np.float32), "token_ids": np.arange(4, dtype=np.int32)},
        {"rows": np.ones((2, 3), np.float32), "token_ids": np.arange(3, dtype=np.int32)},
        {"rows": np.ones((2, 3, 4), np.float64), "token_ids": np.arange(3, dtype=np.int32)},
        {"rows": np.full((2, 3, 4), np.nan, np.float32), "token_ids": np.arange(3, dtype=np.int32)},
        {"rows": np.ones((0, 3, 4), np.float32), "token_ids": np.arange(3, dtype=np.int32)},
    ],
)
def test_a_file_of_something_else_is_no_reference(tensors: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(tensor_bytes(tensors, {"layout": "1"}))

    with pytest.raises(InvalidInput, match=r"x\.safetensors holds no reference; write one with"):
        read_reference(file)


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot be read"):
        read_reference(tmp_path / "none")


def test_the_prompt_is_a_text_cut_to_24_tokens_or_ids_without_a_tokenizer() -> None:
    text = reference_ids(PromptTokenizer(tiny_tokenizer(), vocabulary=97))
    assert len(text) == 24
    assert text[0] == 0  # as a prompt begins, with BOS
    ids = reference_ids(PromptTokenizer(None, vocabulary=97, context_length=100))
    assert len(set(ids.tolist())) == 24
    assert ids.max() < 97
    assert ids.dtype == np.int32
    assert len(reference_ids(PromptTokenizer(None, vocabulary=97, context_length=8))) == 8


def test_a_model_that_cannot_be_run_is_told_why(tmp_path: Path, settings: Settings) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"model_type": "llama"}')

    with pytest.raises(EngineFailed, match=r"could not be made: .*could not be loaded.*--write-reference, and given"):
        reference_for(str(broken), settings=settings)
    assert [file.suffix for file in (settings.cache_dir / "self-check").iterdir()] == [".json"]


def test_a_process_that_is_killed_may_lack_memory(
    folder: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **_options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, -9, "", "")

    monkeypatch.setattr(subprocess, "run", run)

    with pytest.raises(EngineFailed, match="ended by signal 9, as where memory runs out"):
        reference_for(str(folder), settings=settings)
