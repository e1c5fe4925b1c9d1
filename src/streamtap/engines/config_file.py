"""A checkpoint's ``config.json``, read as it stands: without transformers, torch or weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from streamtap.errors import InvalidInput

#: What configs call each fact, the usual name first.
NAMES = {
    "n_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "n_embed"),
    "max_model_len": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
    "vocabulary": ("vocab_size",),
}
_NESTED = ("text_config", "llm_config", "language_config")


def text_config(folder: Path) -> Mapping[str, Any]:
    """The config in ``folder``, with the part of it that is about text on top, as far as that says anything.

    Raises:
        InvalidInput: there is none, or it is no JSON object.
    """
    file = folder / "config.json"
    try:
        whole = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInput(
            f"{file} cannot be read as JSON ({type(error).__name__}); is the checkpoint whole?"
        ) from error
    if not isinstance(whole, dict):
        raise InvalidInput(f"{file} holds no JSON object; is the checkpoint whole?")
    inner: dict[str, Any] = next((whole[name] for name in _NESTED if isinstance(whole.get(name), dict)), {})
    return whole | {name: value for name, value in inner.items() if value is not None}


def number_in(config: Mapping[str, Any], fact: str) -> int | None:
    """One of ``NAMES`` as the config has it, or None."""
    found = (config.get(name) for name in NAMES[fact])
    whole_numbers = (value for value in found if isinstance(value, int) and not isinstance(value, bool))
    return next((value for value in whole_numbers if value > 0), None)


def dtype_in(config: Mapping[str, Any]) -> str | None:
    """The dtype that the weights were saved in, or None."""
    stored = config.get("dtype") or config.get("torch_dtype")
    return stored if isinstance(stored, str) else None
