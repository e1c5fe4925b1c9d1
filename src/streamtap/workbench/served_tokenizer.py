"""The tokenizer of a model that a service runs: its files on this machine, and what tells it from another."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from streamtap.engines.api_tokens import in_memory_fingerprint
from streamtap.engines.demo_model import DEMO, is_unpacked
from streamtap.engines.references import ModelReference, find_model, tokenizer_fingerprint
from streamtap.engines.tokenizing import PromptTokenizer
from streamtap.fingerprint import content_hash
from streamtap.settings import Settings
from streamtap.workbench.tokenizer_limits import limits_of


def small_files(name: str, revision: str | None, settings: Settings) -> ModelReference | None:
    """Config and tokenizer of ``name`` where they are on this machine; the weights beside them are not read.

    Raises:
        InvalidInput: a path without a model, or a revision of something that has none.
    """
    if name == DEMO and not is_unpacked(settings):
        return None
    found = find_model(name, revision, settings=settings, recall=_unhashed)
    return None if found.folder is None or found.gguf is not None else found


def told_apart_by(tokenizer: Any, settings: Settings) -> Mapping[str, Any] | None:
    """What differs between any two tokenizers that ``ApiEngine.load`` may get; None while the files are not here.

    Raises:
        InvalidInput: a path without a model.
    """
    if tokenizer is None:
        return {}
    if isinstance(tokenizer, str | Path):
        found = small_files(str(tokenizer), None, settings)
        if found is None or found.folder is None:
            return None
        return {"files": tokenizer_fingerprint(found), "config": content_hash([found.folder / "config.json"])}
    read = tokenizer if isinstance(tokenizer, PromptTokenizer) else PromptTokenizer(tokenizer)
    return {"rules": in_memory_fingerprint(read.tokenizer), "limits": limits_of(read)}


def _unhashed(_key: str) -> Mapping[str, Any]:
    return {"commit": "sha256:"}
