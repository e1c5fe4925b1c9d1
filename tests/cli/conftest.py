"""A tiny model in a folder, and a file of the prompts that a module names."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamtap.testing.models import tiny_model
from streamtap.testing.tokenizers import tiny_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of the model."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model("llama").save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def file(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The module's PROMPTS, one a line."""
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(request.module.PROMPTS) + "\n")
    return path
