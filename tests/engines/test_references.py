"""From a name to files and their identity: folders, GGUF files, the Hub's cache, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from streamtap.engines import references as module
from streamtap.engines.references import ModelReference, find_model, has_tokenizer, tokenizer_fingerprint
from streamtap.errors import InvalidInput
from streamtap.settings import Settings

COMMIT, OTHER = "a" * 40, "b" * 40


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(tmp_path / "cache", tmp_path / "hub")


def model_folder(path: Path, weights: bytes = b"weights", **more: str) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (path / "model.safetensors").write_bytes(weights)
    for name, text in more.items():
        (path / name.replace("__", ".")).write_text(text)
    return path


def commit_of(path: Path, settings: Settings) -> str:
    commit = find_model(str(path), settings=settings).commit
    assert commit is not None
    return commit


def test_a_folder_is_its_content(tmp_path: Path, settings: Settings) -> None:
    folder = model_folder(tmp_path / "a", README__md="hello", tokenizer__json="{}")
    found = find_model(str(folder), settings=settings)
    commit = found.commit or ""

    assert (found.folder, found.gguf, found.is_hub) == (folder, None, False)
    assert commit.startswith("sha256:")
    assert commit_of(model_folder(tmp_path / "b"), settings) == commit
    assert commit_of(model_folder(tmp_path / "c", b"Weights"), settings) != commit
    (folder / "README.md").write_text("changed")
    (folder / "tokenizer.json").write_text("changed too, and has an identity of its own")
    assert commit_of(folder, settings) == commit
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert commit_of(folder, settings) != commit


def test_a_shard_more_is_another_model(tmp_path: Path, settings: Settings) -> None:
    folder = model_folder(tmp_path / "a")
    commit = commit_of(folder, settings)
    for name in ("model-2.safetensors", "pytorch_model.bin", "adapter_config.json"):
        (folder / name).write_bytes(b"more")
        assert commit_of(folder, settings) != commit
        (folder / name).unlink()
    assert commit_of(folder, settings) == commit


def test_a_folder_under_the_home_folder_is_found(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))

    folder = model_folder(tmp_path / "a")
    assert find_model("~/a", settings=settings).folder == folder


def test_a_gguf_file_is_its_own_content_and_not_its_neighbours(tmp_path: Path, settings: Settings) -> None:
    for name, content in (("one.gguf", b"1"), ("two.gguf", b"2")):
        (tmp_path / name).write_bytes(content)
    one, two = (find_model(str(tmp_path / name), settings=settings) for name in ("one.gguf", "two.gguf"))

    assert (one.folder, one.gguf, one.is_hub) == (tmp_path, "one.gguf", False)
    assert one.commit != two.commit
    assert tokenizer_fingerprint(one) == f"gguf:{one.commit}"
    assert has_tokenizer(one)
    (tmp_path / "two.gguf").write_bytes(b"3")
    assert find_model(str(tmp_path / "one.gguf"), settings=settings).commit == one.commit


def test_weights_are_read_once_and_again_when_they_change(tmp_path: Path, settings: Settings) -> None:
    folder, memo, known = model_folder(tmp_path / "a"), {}, []

    def remember(key: str, value: Mapping[str, Any]) -> None:
        memo[key] = value

    def recall(key: str) -> Mapping[str, Any] | None:
        known.append(key in memo)
        return memo.get(key)

    def commit() -> str | None:
        return find_model(str(folder), settings=settings, recall=recall, remember=remember).commit

    first, again = commit(), commit()
    assert first == again == commit_of(folder, settings)
    (folder / "model.safetensors").write_bytes(b"Weights")
    os.utime(folder / "model.safetensors", ns=(1, 1))
    assert commit() != first
    assert known == [False, True, False]


def test_the_tokenizer_is_the_files_that_decide_how_text_becomes_tokens(tmp_path: Path, settings: Settings) -> None:
    folder = model_folder(tmp_path / "a", tokenizer__json="1", tokenizer_config__json="2")
    reference = find_model(str(folder), settings=settings)
    before = tokenizer_fingerprint(reference)

    (folder / "README.md").write_text("changed")
    (folder / "config.json").write_text("changed")
    assert tokenizer_fingerprint(reference) == before
    for name in ("tokenizer.json", "chat_template.jinja", "merges.txt", "added_tokens.json", "tekken.json"):
        old = (folder / name).read_bytes() if (folder / name).exists() else None
        (folder / name).write_text("changed")
        assert tokenizer_fingerprint(reference) != before, name
        if old is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(old)
    assert tokenizer_fingerprint(reference) == before


def test_a_folder_may_have_no_tokenizer(tmp_path: Path, settings: Settings) -> None:
    assert not has_tokenizer(find_model(str(model_folder(tmp_path / "a")), settings=settings))
    assert has_tokenizer(find_model(str(model_folder(tmp_path / "b", merges__txt="")), settings=settings))
    assert not has_tokenizer(ModelReference("org/model", None))
    assert tokenizer_fingerprint(ModelReference("org/model", None)) == ""


def hub_model(settings: Settings, name: str, commit: str, ref: str | None = "main", weights: bytes = b"w") -> Path:
    """A model as the Hub's client lays it out: snapshots of links to blobs, and refs that name a snapshot."""
    repo = settings.hub_cache_dir / ("models--" + name.replace("/", "--"))
    plain = model_folder(settings.cache_dir / commit[:4] / name, weights)
    snapshot = repo / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir(exist_ok=True)
    for file in plain.iterdir():
        blob = repo / "blobs" / f"{commit[:4]}-{file.name}"
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(blob)
    if ref is not None:
        (repo / "refs" / ref).parent.mkdir(parents=True, exist_ok=True)
        (repo / "refs" / ref).write_text(commit)
    return snapshot


def test_a_hub_id_is_the_commit_its_branch_stands_at(settings: Settings) -> None:
    main = hub_model(settings, "org/model", COMMIT)
    branch = hub_model(settings, "org/model", OTHER, "refs/pr/1")

    found = find_model("org/model", settings=settings)
    assert (found.folder, found.commit, found.gguf, found.is_hub) == (main, COMMIT, None, True)
    assert find_model("org/model", "main", settings=settings).commit == COMMIT
    assert find_model("org/model", "refs/pr/1", settings=settings).folder == branch
    assert find_model("org/model", OTHER, settings=settings).folder == branch
    assert find_model("org/model", OTHER, settings=settings).revision == OTHER


def test_a_hub_id_of_one_word_is_one_too(settings: Settings) -> None:
    assert find_model("gpt2", settings=settings).folder is None
    snapshot = hub_model(settings, "gpt2", COMMIT)
    assert find_model("gpt2", settings=settings).folder == snapshot


@pytest.mark.parametrize("revision", [None, "v2", "c" * 40])
def test_a_hub_id_that_is_not_here_has_no_commit_yet(settings: Settings, revision: str | None) -> None:
    hub_model(settings, "org/other", COMMIT)
    if revision is not None:
        hub_model(settings, "org/model", COMMIT)

    found = find_model("org/model", revision, settings=settings)

    assert (found.folder, found.commit, found.revision, found.is_hub) == (None, None, revision, True)


def test_a_snapshot_without_config_is_not_here(settings: Settings) -> None:
    (hub_model(settings, "org/model", COMMIT) / "config.json").unlink()

    assert find_model("org/model", settings=settings).folder is None


@pytest.mark.parametrize(
    "name", ["./missing", "/missing/model", "~/missing", "../missing", "a/b/c", "", "  ", "missing.gguf", "a/b.gguf"]
)
def test_a_path_that_is_not_there_is_no_hub_id(name: str, settings: Settings) -> None:
    with pytest.raises(InvalidInput, match="neither a folder, a GGUF file nor a Hub id.*'demo'"):
        find_model(name, settings=settings)


def test_a_folder_without_config_is_refused(tmp_path: Path, settings: Settings) -> None:
    (tmp_path / "empty").mkdir()

    with pytest.raises(InvalidInput, match="no config.json; expected a transformers model folder"):
        find_model(str(tmp_path / "empty"), settings=settings)


def test_only_the_hub_has_revisions(tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "demo_folder", lambda _settings: pytest.fail("work was done"))
    folder = model_folder(tmp_path / "a")
    (tmp_path / "b.gguf").write_bytes(b"1")

    for name in (str(folder), str(tmp_path / "b.gguf"), "demo"):
        with pytest.raises(InvalidInput, match="revision='v1' means nothing for .*only Hub ids"):
            find_model(name, "v1", settings=settings)


def test_the_demo_model_is_identified_by_its_content(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder(tmp_path / "a")
    monkeypatch.setattr(module, "demo_folder", lambda _settings: folder)

    found = find_model("demo", settings=settings)

    assert (found.name, found.folder, found.commit) == ("demo", folder, commit_of(folder, settings))


def test_a_name_is_found_without_torch_or_transformers(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "a", tokenizer__json="{}")
    code = (
        "import sys; from pathlib import Path; from streamtap.settings import Settings; "
        "from streamtap.engines.references import *; s = Settings(Path('c'), Path('h')); "
        f"print(find_model({str(folder)!r}, settings=s).commit, find_model('org/model', settings=s).commit); "
        "print(sorted({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)))"
    )
    source = str(Path(module.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": source},
    )

    first, second = done.stdout.splitlines()
    assert first.startswith("sha256:")
    assert first.endswith(" None")
    assert second == "[]"
