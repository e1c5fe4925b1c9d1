"""A tiny model, as files with its weights and without, and a stand-in of NDIF that serves it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from streamtap.engines.nnsight.engine import NnsightEngine
from streamtap.engines.references import ModelReference
from streamtap.testing.models import tiny_model
from streamtap.testing.ndif_server import NdifServer, Served
from streamtap.testing.tokenizers import tiny_tokenizer

NAME = "org/tiny"
KEY = "11111111-2222-3333-4444-555555555555"


@pytest.fixture(autouse=True)
def no_key_of_the_person(monkeypatch: pytest.MonkeyPatch) -> None:
    from nnsight.schema.config import CONFIG

    monkeypatch.delenv("NDIF_API_KEY", raising=False)
    monkeypatch.setattr(CONFIG.API, "APIKEY", None)
    monkeypatch.setattr(CONFIG.API, "HOST", "http://127.0.0.1:9")  # where nothing listens


@pytest.fixture(scope="module", autouse=True)
def paths_are_left_as_they_were() -> Iterator[None]:
    paths = list(sys.path)
    yield
    assert sys.path == paths


@pytest.fixture(scope="session")
def model() -> Any:
    return tiny_model("llama")


@pytest.fixture(scope="session")
def whole_folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's files."""
    folder = tmp_path_factory.mktemp("whole")
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def bare_folder(whole_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without a file of weights."""
    folder = tmp_path_factory.mktemp("bare") / "tiny"
    shutil.copytree(whole_folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    assert not list(folder.glob("*.safetensors"))
    return folder


@pytest.fixture(scope="module")
def ndif(model: Any) -> Iterator[NdifServer]:
    with NdifServer({NAME: Served.over(model, tiny_tokenizer())}, key=KEY) as server:
        yield server


@pytest.fixture
def open_remote(ndif: NdifServer, bare_folder: Path) -> Callable[..., NnsightEngine]:
    """An engine on the stand-in, which waits for nothing before it asks again."""
    known = ModelReference(NAME, bare_folder, None, "sha256:of-files")

    def opened(**options: Any) -> NnsightEngine:
        engine = NnsightEngine.load(NAME, **{"remote": ndif.url, "api_key": KEY, "reference": known, **options})
        engine.patience = type(engine.patience)(engine.patience.retries, lambda _seconds: None)
        return engine

    return opened
