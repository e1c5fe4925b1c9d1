"""Prompts and capture specs: what is read as what, and what is refused before any work."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from typing import Any

import numpy as np
import pytest

from streamtap.errors import EmptyPrompt, InvalidInput, InvalidPositions, InvalidPrompt, UnsupportedSite
from streamtap.spec import CaptureSpec, Prompt, as_prompts

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}]


def same(a: Prompt, b: Prompt) -> bool:
    return (a.text, a.messages, a.token_ids) == (b.text, b.messages, b.token_ids)


@pytest.mark.parametrize(
    ("value", "prompt"),
    [
        ("hello", Prompt(text="hello")),
        (" ", Prompt(text=" ")),
        ([5, 6], Prompt(token_ids=(5, 6))),
        ((5,), Prompt(token_ids=(5,))),
        (range(3), Prompt(token_ids=(0, 1, 2))),
        (np.array([5, 6], np.uint16), Prompt(token_ids=(5, 6))),
        ([np.int64(5), 6], Prompt(token_ids=(5, 6))),
        (CHAT, Prompt(messages=(("user", "hi"), ("assistant", "")))),
        ([UserDict(CHAT[0])], Prompt(messages=(("user", "hi"),))),
    ],
    ids=lambda value: str(value)[:20],
)
def test_each_kind_of_prompt_is_read(value: Any, prompt: Prompt) -> None:
    assert same(Prompt.of(value, 0), prompt)


def test_a_prompt_is_taken_as_it_is() -> None:
    prompt = Prompt(token_ids=[1, 2], positions=[1])

    assert Prompt.of(prompt, 0) is prompt


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (5, "of type int;"),  # a list of token ids given for a list of prompts
        (np.int64(5), "of type int64;"),
        (None, "of type NoneType;"),
        (b"hello", "of type bytes;"),  # a list of ints to Python
        (bytearray(b"hello"), "of type bytearray;"),
        ({"role": "user", "content": "secret"}, "of type dict;"),
        ([5.0], "list that holds float;"),
        ([True], "list that holds bool;"),
        ([5, "secret"], "list that holds int/str;"),
        (["secret", "words"], "list that holds str;"),
        (np.array([1.0]), "ndarray that holds float64;"),
        (np.array([[1, 2]]), "ndarray that holds ndarray;"),
        (np.array(3), "of type ndarray;"),
        ([[1, 2]], "list that holds list;"),
        (Prompt(), "sets 0 of text, messages and token_ids"),
        (Prompt(text="secret", token_ids=[1]), "sets 2 of text, messages and token_ids"),
        ([{"role": "user"}], "exactly a 'role' and a 'content'.*'role': 'str'"),
        ([{"role": "user", "content": None}], "'content': 'NoneType'"),
        ([{"role": "user", "content": [{"type": "text", "text": "secret"}]}], "'content': 'list'"),
        ([{"role": "user", "content": "secret", "name": "x"}], "'name': 'str'"),
        ([{}], "exactly"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_no_prompt_is_refused_by_index_without_its_text(value: Any, reason: str) -> None:
    with pytest.raises(InvalidPrompt, match=f"^prompt 4.*{reason}") as caught:
        Prompt.of(value, 4)

    assert caught.value.index == 4
    assert not isinstance(caught.value, EmptyPrompt)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "value", ["", [], (), np.array([], int), Prompt(text=""), Prompt(token_ids=[]), Prompt(messages=())], ids=repr
)
def test_what_is_empty_is_refused_by_index(value: Any) -> None:
    with pytest.raises(EmptyPrompt, match="^prompt 1 is .*empty") as caught:
        as_prompts(["hello", value])

    assert caught.value.index == 1


def test_one_prompt_for_a_list_of_them_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"got one string. Wrap it: \[prompt\]"):
        as_prompts("hello")
    with pytest.raises(InvalidInput, match=r"messages of one chat. Wrap it: \[messages\]"):
        as_prompts(CHAT)  # type: ignore[arg-type]
    with pytest.raises(InvalidPrompt, match="prompt 0 is of type int"):
        as_prompts([5, 6, 7])  # type: ignore[list-item]


def test_prompts_of_all_kinds_may_be_mixed() -> None:
    read = as_prompts(["hi", CHAT, [1, 2]])

    assert [prompt.text for prompt in read] == ["hi", None, None]
    assert as_prompts([]) == []


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("pooling", "median", InvalidInput),
        ("positions", "first", InvalidPositions),
        ("positions", [], InvalidPositions),
        ("truncate", "middle", InvalidInput),
        ("truncate", True, InvalidInput),
        ("logits", True, InvalidInput),
        ("logits", "first", InvalidInput),
        ("logit_top_k", 0, InvalidInput),
        ("logit_top_k", -1, InvalidInput),
        ("logit_top_k", 2.5, InvalidInput),
        ("logit_top_k", "5", InvalidInput),
        ("logit_top_k", True, InvalidInput),
        ("site", "mlp", UnsupportedSite),
    ],
)
def test_a_value_that_means_nothing_is_refused_by_name(field: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"{field}.*{value!r}".replace("[]", r"\[\]")):
        CaptureSpec(**{field: value})


def test_a_spec_is_frozen_and_equal_to_its_like() -> None:
    spec = CaptureSpec(layers=(1, 2), logit_top_k=np.int64(3))  # type: ignore[arg-type]

    assert spec == CaptureSpec(layers=(1, 2), logit_top_k=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.exact = True  # type: ignore[misc]
    with pytest.raises(UnsupportedSite):
        dataclasses.replace(spec, site="mlp")


@pytest.mark.parametrize(
    ("ask", "needs"),
    [
        ({}, False),
        ({"perplexity": True}, True),
        ({"token_nll": True}, True),
        ({"logits": "last"}, True),
        ({"logits": "all"}, True),
        ({"logit_top_k": 5}, False),
    ],
    ids=str,
)
def test_the_head_is_needed_for_what_it_alone_gives(ask: dict[str, Any], needs: bool) -> None:
    assert CaptureSpec(**ask).needs_head is needs
