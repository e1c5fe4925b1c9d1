from __future__ import annotations

import pytest

from streamtap.cache import CacheStore
from streamtap.errors import NotCached
from streamtap.spec import CaptureSpec, as_prompts
from streamtap.testing.fake_engine import FakeEngine
from streamtap.workbench.known_model import KnownModel
from streamtap.workbench.model_source import ModelSource
from streamtap.workbench.prompt_keys import PromptKeys

LIMITS = {"context_length": 64, "vocabulary": 97, "special_ids": [0]}


def test_a_model_that_is_only_known_finds_prompts_and_makes_none(tmp_path: str) -> None:
    known: ModelSource = KnownModel(FakeEngine().provenance, LIMITS)
    spec = CaptureSpec()
    with CacheStore(tmp_path) as store:
        finder = PromptKeys(store, known, spec)
        prompts = as_prompts(["The sky", "never seen"])
        assert finder.seen(prompts) == [None, None]
        with pytest.raises(NotCached, match="prompt 0 was never tokenised for fake"):
            finder.find(prompts)
    assert known.is_only_known
    assert known.may_change
    known.close()
    with pytest.raises(NotCached, match="and not the model"):
        known.engine()
