"""The card says what is there, and what it tells a reader to run runs."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import DatasetCard, metadata_load

from streamtap.dataset.card import make_card
from streamtap.dataset.contents import describe, make_plan
from streamtap.dataset.folder import FolderTarget
from streamtap.dataset.manifest import FileSum, Hidden, Logits, Manifest, Shard
from streamtap.dataset.names import CARD, INDEX
from streamtap.dataset.writer import publish

Make = Callable[..., Any]
HIDDEN = Hidden((0, 1, 2), 576, "float32", "last_token", (Shard(12, 12),))
BLOCK = """
import sys

class Absent:
    def find_spec(self, name, *where):
        if name.partition(".")[0] in ("torch", "pandas", "streamtap"):
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Absent())
"""
MANIFEST = Manifest("user/model", "c0ffee", 12, HIDDEN, None)


def head_of(text: str, tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "README.md").write_text(text, encoding="utf-8")
    head = metadata_load(tmp_path / "README.md")
    assert head is not None
    return dict(head)


def test_the_head_is_what_the_hub_reads(tmp_path: Path) -> None:
    text = make_card(MANIFEST, "Twelve prompts.", "cc-by-4.0", "user/set")

    assert head_of(text, tmp_path) == {
        "license": "cc-by-4.0",
        "pretty_name": "Activations of user/model",
        "tags": ["activations", "residual-stream", "interpretability", "streamtap", "lmprobe"],
        "size_categories": ["n<1K"],
        "configs": [{"config_name": "default", "data_files": [{"split": "train", "path": "index/*.parquet"}]}],
    }
    card = DatasetCard(text)
    assert card.data.license == "cc-by-4.0"
    assert card.text.strip().startswith("# Activations of user/model\n\nTwelve prompts.\n")


NAMES = [
    'my "best" model',
    "it's: #1 - [x] {y}",
    "модель/漢字 \U0001f600",
    "--- yaml: no",
    "a\\b",
    "- x",
    "%tag",
    "null",
    "1.0",
]


@pytest.mark.parametrize("name", NAMES)
def test_any_name_and_licence_are_kept(name: str, tmp_path: Path) -> None:
    head = head_of(make_card(replace(MANIFEST, model=name), None, name, name), tmp_path)

    assert head["pretty_name"] == f"Activations of {name}"
    assert head["license"] == name


@pytest.mark.parametrize("name", [*NAMES, "user/set", "./set"])
def test_the_samples_of_the_card_are_python(name: str) -> None:
    text = make_card(MANIFEST, None, "mit", name)
    samples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)

    assert len(samples) == 2
    for sample in samples:
        compile(sample, "card", "exec")


@pytest.mark.parametrize(
    ("n_prompts", "size"),
    [(1, "n<1K"), (999, "n<1K"), (1000, "1K<n<10K"), (25_000, "10K<n<100K"), (10**6, "1M<n<10M"), (10**7, "n>10M")],
)
def test_the_size_category(n_prompts: int, size: str, tmp_path: Path) -> None:
    assert head_of(make_card(replace(MANIFEST, n_prompts=n_prompts), None, "mit", "x"), tmp_path)[
        "size_categories"
    ] == [size]


def test_the_globs_match_the_index_and_nothing_else(make: Make, tmp_path: Path) -> None:
    publish(make(9, k=2).contents, FolderTarget(tmp_path / "set"), shard_max_bytes=64)
    head = metadata_load(tmp_path / "set" / CARD)
    assert head is not None
    globs = [each["path"] for config in head["configs"] for each in config["data_files"]]
    files = [file.relative_to(tmp_path / "set").as_posix() for file in (tmp_path / "set").rglob("*") if file.is_file()]

    assert [file for file in files if any(fnmatch(file, glob) for glob in globs)] == [INDEX]


def test_the_table_says_what_there_is() -> None:
    manifest = replace(
        MANIFEST,
        logits=Logits(10, "float32", (Shard(12, 12),)),
        ordering="random",
        capture={"identity": {"positions": "-5:"}},
        files={"a": FileSum(1_500_000, "x"), "b": FileSum(1_000_000, "y")},
    )
    table = dict(re.findall(r"^\| (\w+) \| (.*) \|$", make_card(manifest, None, "mit", "x"), re.MULTILINE))

    assert table["model"] == "`user/model`"
    assert table["commit"] == "`c0ffee`"
    assert table["prompts"] == "12, in random order"
    assert table["layers"] == "0 to 2"
    assert table["rows"] == "one a prompt, pooling `last_token`"
    assert (table["hidden"], table["dtype"]) == ("576", "float32")
    assert table["positions"] == "only -5:"
    assert table["logits"] == "the 10 largest of the last position, raw"
    assert table["size"] == "2.5 MB in 2 files"


def test_layers_with_gaps_and_what_is_not_recorded() -> None:
    text = make_card(
        replace(MANIFEST, commit=None, hidden=replace(HIDDEN, layers=(16, 8), pooling=None)), None, "mit", "x"
    )

    assert "| layers | 8, 16 |" in text
    assert "| commit | not recorded |" in text
    assert "| rows | one a token |" in text
    assert "`token_shard_ids`" in text
    assert "| positions |" not in text
    assert "| size |" not in text


def test_a_card_without_activations_or_a_description(make: Make) -> None:
    contents = make(3, layers=(), k=2).contents
    text = make_card(describe(contents, make_plan(contents)), None, "mit", "x")

    assert "load_activations" not in text
    assert "| logits | the 2 largest of the last position, raw |" in text


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("counts", [None, [3, 1, 2, 2, 1]], ids=["pooled", "full sequence"])
def test_the_plain_sample_gives_the_rows(
    dtype: str, counts: Any, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(5, counts=counts, dtype=dtype, layers=[0, 3, 1000])
    size = 2 * made.contents.hidden.width * made.contents.hidden.dtype.itemsize
    publish(made.contents, FolderTarget(tmp_path / "set"), shard_max_bytes=size)
    text = (tmp_path / "set" / CARD).read_text(encoding="utf-8")
    sample = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[-1]
    is_plain = "torch" not in sample
    assert is_plain == (dtype != "bfloat16")
    assert ("pyarrow and safetensors alone" in text) == is_plain
    monkeypatch.chdir(tmp_path / "set")
    names: dict[str, Any] = {}
    exec(compile(sample, "card", "exec"), names)

    expected = made.rows[3] if counts is None else made.rows[3][made.offsets[1:] - 1]
    found = names["X"] if is_plain else names["X"].float().numpy()
    assert np.array_equal(found.astype(np.float32), expected.astype(np.float32))


def test_the_plain_sample_needs_nothing_else(make: Make, tmp_path: Path) -> None:
    publish(make(5).contents, FolderTarget(tmp_path / "set"))
    sample = re.findall(r"```python\n(.*?)```", (tmp_path / "set" / CARD).read_text(encoding="utf-8"), re.DOTALL)[-1]
    program = BLOCK + sample + "\nassert X.shape == (5, 4)"
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path / "set", check=True)
