"""What tokenising depends on beside the tokenizer's files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from streamtap.engines.tokenizing import PromptTokenizer


def limits_of(tokenizer: PromptTokenizer) -> Mapping[str, Any]:
    """``context_length``, ``vocabulary`` and ``special_ids``: arguments of ``PromptTokenizer``."""
    return {
        "context_length": tokenizer.context_length,
        "vocabulary": tokenizer.vocabulary,
        "special_ids": [int(i) for i in tokenizer.special_ids],
    }
