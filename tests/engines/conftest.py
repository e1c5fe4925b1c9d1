"""An ``ApiEngine`` before the stand-in of a service that a module has, by its fixture ``service``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from streamtap.engines.api import ApiEngine
from streamtap.engines.tokenizing import PromptTokenizer
from streamtap.testing.characters import VOCABULARY
from streamtap.testing.stub_harvests import MODEL
from streamtap.testing.stub_service import BASE


@pytest.fixture
def loading() -> dict[str, Any]:
    """What every engine of a module is opened with; here a tokenizer of token ids alone."""
    return {"tokenizer": PromptTokenizer(None, context_length=2048, vocabulary=VOCABULARY)}


@pytest.fixture
def load(service: Any, loading: dict[str, Any]) -> Iterator[Callable[..., ApiEngine]]:
    """Opens engines, which are closed after the test."""
    opened = []

    def loaded(**options: Any) -> ApiEngine:
        named = {"api_base": BASE, "client": service.client(), "first_pause_seconds": 0.001}
        opened.append(ApiEngine.load(MODEL, **{**named, **loading, **options}))
        return opened[-1]

    yield loaded
    for engine in opened:
        engine.close()
