from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from streamtap.activations import Provenance
from streamtap.cache import CacheStore
from streamtap.errors import InvalidInput
from streamtap.spec import CaptureSpec
from streamtap.workbench.pulled import (
    PulledModel,
    find_pulled,
    pulled_models,
    remember_pulled,
    sets_at_hand,
    text_commit,
)
from streamtap.workbench.wanted import row_identity

WHOLE = Provenance("org/m", "c0ffee", "tokens", "float32", engine="fake", n_layers=30, hidden=8)
BY_TEXT = Provenance("org/m", "c0ffee", "", "float32", engine="", n_layers=16, hidden=8)
LIMITS = {"context_length": None, "vocabulary": None, "special_ids": []}
SPEC = CaptureSpec(layers=(), pooling="last_token")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CacheStore]:
    with CacheStore(tmp_path) as opened:
        yield opened


def remember(store: CacheStore, provenance: Provenance, *unknown: str) -> None:
    remember_pulled(store, PulledModel(provenance, LIMITS, unknown))


def test_a_model_that_cannot_be_told_from_another_is_one_with_it(store: CacheStore) -> None:
    remember(store, BY_TEXT, "its tokenizer")
    remember(store, replace(BY_TEXT, n_layers=30, engine_version="2"), "its tokenizer")
    remember(store, replace(BY_TEXT, n_layers=2), "its tokenizer")
    found = pulled_models(store, "org/m")

    assert [each.provenance.n_layers for each in found] == [30]
    remember(store, replace(BY_TEXT, dtype="bfloat16"), "its tokenizer")
    assert len(pulled_models(store, "org/m")) == 2
    assert pulled_models(store, "org/other") == []


def test_what_is_known_best_goes_first(store: CacheStore) -> None:
    assert find_pulled(store, "org/m", None, "auto") is None
    remember(store, WHOLE)
    remember(store, BY_TEXT, "its tokenizer")
    found = find_pulled(store, "org/m", None, "auto")

    assert found is not None
    assert (found.provenance, found.unknown) == (WHOLE, ())


def test_of_models_that_a_caller_cannot_tell_apart_it_is_the_newest(store: CacheStore) -> None:
    for tokenizer in ("one", "two"):
        remember(store, replace(WHOLE, tokenizer=tokenizer))
    found = find_pulled(store, "org/m", None, "float32")

    assert found is not None
    assert found.provenance.tokenizer == "two"


def test_what_was_asked_for_picks(store: CacheStore) -> None:
    for commit, dtype, quantization in (
        ("c0ffee", "float32", None),
        ("decade", "float32", None),
        ("decade", "float16", "8bit"),
    ):
        remember(store, replace(WHOLE, commit=commit, dtype=dtype, quantization=quantization))

    def commit(revision: str | None, dtype: str, quantization: object = None) -> str | None:
        found = find_pulled(store, "org/m", revision, dtype, quantization)
        return None if found is None else found.provenance.commit

    assert commit("c0ff", "auto") == "c0ffee"
    assert commit("dec", "float32") == "decade"
    assert commit(None, "float16", "8bit") == commit(None, "auto", "8bit") == commit(None, "auto", object()) == "decade"
    assert commit("c0ffee", "float16", "8bit") is None
    with pytest.raises(InvalidInput, match=r"2 different models called org/m were pulled: revision='c0ffee'; rev"):
        commit(None, "auto")
    with pytest.raises(InvalidInput, match=r"revision='c0ffee'; revision='decade'\. Pick one with revision="):
        commit(None, "float32")


def test_a_model_that_is_not_quantised_is_not_served_by_one_that_is(store: CacheStore) -> None:
    remember(store, replace(WHOLE, quantization="bitsandbytes:4"))
    assert find_pulled(store, "org/m", None, "auto") is None
    remember(store, WHOLE)
    remember(store, replace(WHOLE, quantization="gptq:8"))

    def quantization(asked: object) -> str | None:
        found = find_pulled(store, "org/m", None, "auto", asked)
        assert found is not None
        return found.provenance.quantization

    assert quantization(None) is None
    assert quantization("gptq:8") == "gptq:8"
    with pytest.raises(InvalidInput, match=r"quantization='bitsandbytes:4'; quantization='gptq:8'\. Pick one with"):
        quantization(object())
    assert find_pulled(store, "org/m", None, "auto", "8bit") is None


def test_a_commit_that_is_not_known_is_no_answer_to_a_revision(store: CacheStore) -> None:
    remember(store, replace(BY_TEXT, commit=text_commit("org/m", None)), "its commit")
    assert find_pulled(store, "org/m", None, "auto") is not None
    for revision in ("c0ffee", "u", "unknown"):
        assert find_pulled(store, "org/m", revision, "auto") is None
    remember(store, replace(BY_TEXT, commit=text_commit("org/m", "main")), "its commit")
    assert find_pulled(store, "org/m", "m", "auto") is None
    with pytest.raises(InvalidInput, match="revision='main of org/m'; revision='unknown:org/m'"):
        find_pulled(store, "org/m", None, "auto")
    for revision, commit in (("main", "main of org/m"), ("main of org/m",) * 2, ("unknown:org/m",) * 2):
        found = find_pulled(store, "org/m", revision, "auto")
        assert found is not None
        assert found.provenance.commit == commit


@pytest.mark.parametrize(
    ("pulled", "is_served"),
    [
        (BY_TEXT, True),
        (replace(BY_TEXT, commit=text_commit("org/m", None)), True),
        (replace(BY_TEXT, commit=text_commit("org/m", "c0ffee")), True),
        (replace(BY_TEXT, commit=text_commit("org/m", "main")), False),
        (replace(BY_TEXT, commit=text_commit("org/other", None)), False),
        (replace(BY_TEXT, commit=""), False),
        (replace(BY_TEXT, n_layers=3), True),
        (replace(BY_TEXT, commit="decade"), False),
        (replace(BY_TEXT, dtype="bfloat16"), False),
        (replace(BY_TEXT, hidden=16), False),
        (replace(BY_TEXT, quantization="8bit"), False),
    ],
)
def test_rows_by_text_serve_the_same_model_alone(pulled: Provenance, is_served: bool, store: CacheStore) -> None:
    remember(store, pulled, "its tokenizer")
    candidates = [each for each in sets_at_hand(store, WHOLE, SPEC) if each.by_text]

    assert [each.identity for each in candidates[:1]] == ([row_identity(pulled, SPEC)] if is_served else [])
    assert all(each.keys == "texts" for each in candidates)


def test_rows_of_the_model_itself_go_before_those_by_text(store: CacheStore) -> None:
    remember(store, BY_TEXT, "its tokenizer")
    kinds = [each.by_text for each in sets_at_hand(store, WHOLE, SPEC)]

    assert kinds == sorted(kinds)
    assert any(kinds)
    assert not any(each.by_text for each in sets_at_hand(store, BY_TEXT, SPEC))
