"""Prompts to token ids: what each kind becomes, where it is cut, and what is refused by its index."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from streamtap.engines.tokenizing import PromptTokenizer, Tokens
from streamtap.errors import EmptyPrompt, InvalidPositions, InvalidPrompt, PromptTooLong
from streamtap.spec import CaptureSpec, Prompt, as_prompts
from streamtap.testing.tokenizers import tiny_tokenizer

CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]
PLAIN = tiny_tokenizer(adds_bos=False)


def ids_of(text: str) -> list[int]:
    return list(PLAIN(text)["input_ids"])


def encode(prompts: Sequence[Any], first: int = 0, tokenizer: Any = "tiny", **spec: Any) -> list[Tokens]:
    made = tiny_tokenizer() if tokenizer == "tiny" else tokenizer
    return PromptTokenizer(made, context_length=20, vocabulary=97).encode(
        as_prompts(prompts), CaptureSpec(**spec), first
    )


def test_all_kinds_in_one_list_keep_their_places() -> None:
    found = encode([[90, 91], "abc", CHAT[:1], "de", [5]])

    assert [each.token_ids.tolist() for each in found] == [
        [90, 91],
        [0, *ids_of("abc")],
        [0, *ids_of("[user] hello\n")],
        [0, *ids_of("de")],
        [5],
    ]
    assert all(each.token_ids.dtype == np.int32 for each in found)
    assert all(each.positions is None and each.cut_from == 0 for each in found)


def test_a_generation_prompt_is_added_when_asked() -> None:
    (plain,), (opened,) = encode([CHAT[:1]]), encode([CHAT[:1]], generation_prompt=True, truncate="left")

    assert ids_of("[assistant] ")[-5:] == opened.token_ids[-5:].tolist()
    assert opened.cut_from == len(plain.token_ids) + len("[assistant] ")


@pytest.mark.parametrize(("side", "kept"), [("left", list(range(15, 35))), ("right", list(range(10, 30)))])
def test_what_is_too_long_is_cut_on_the_side_asked_for_and_says_so(side: str, kept: list[int]) -> None:
    long, short = encode([list(range(10, 35)), list(range(20))], truncate=side)

    assert long.token_ids.tolist() == kept
    assert long.cut_from == 25
    assert short.cut_from == 0


def test_what_is_too_long_is_refused_by_index_and_length() -> None:
    with pytest.raises(PromptTooLong, match=r"prompt 7 has 21 tokens; there is room for 20\b.*truncate") as caught:
        encode([[5], [5] * 21, [5] * 22], first=6)
    assert caught.value.index == 7


@pytest.mark.parametrize(("ids", "bad"), [([5, 97], 97), ([-1], -1), ([2**40], 2**40)])
def test_an_id_outside_the_vocabulary_is_refused(ids: list[int], bad: int) -> None:
    with pytest.raises(InvalidPrompt, match=f"prompt 1 holds token id {bad}; the vocabulary is 0 to 96") as caught:
        encode([[96], ids])
    assert caught.value.index == 1


def test_without_a_known_vocabulary_an_id_must_still_be_one() -> None:
    tokenizer = PromptTokenizer(None)

    assert tokenizer.encode([Prompt(token_ids=[200_000])], CaptureSpec())[0].token_ids.tolist() == [200_000]
    for ids in ([2**31], [-1]):
        with pytest.raises(InvalidPrompt, match=f"holds token id {ids[0]}"):
            tokenizer.encode([Prompt(token_ids=ids)], CaptureSpec())


@pytest.mark.parametrize(
    ("prompt", "tokenizer", "reason"),
    [
        ("secret", None, "prompt 3 is text, but this engine has no tokenizer; send token ids"),
        (CHAT, None, "prompt 3 is chat messages, but this engine has no tokenizer; send token ids"),
        (CHAT, tiny_tokenizer(chat_template=None), "prompt 3 .* no chat template; send text"),
    ],
    ids=["text", "chat", "template"],
)
def test_what_the_tokenizer_cannot_do_is_said(prompt: Any, tokenizer: Any, reason: str) -> None:
    with pytest.raises(InvalidPrompt, match=reason) as caught:
        encode([[5], prompt], first=2, tokenizer=tokenizer)
    assert caught.value.index == 3


def test_a_text_that_becomes_no_token_is_refused_by_index() -> None:
    mute = SimpleNamespace(bos_token_id=None, chat_template=None)
    silent: Any = type("Silent", (), {"__call__": lambda _s, texts, **_o: {"input_ids": [[] for _ in texts]}})()
    silent.__dict__.update(vars(mute))

    with pytest.raises(EmptyPrompt, match="prompt 1 has no token") as caught:
        encode([[5], "\u200b"], tokenizer=silent)
    assert caught.value.index == 1


def test_half_a_character_is_refused_by_index_and_not_shown() -> None:
    with pytest.raises(InvalidPrompt, match="prompt 1 holds half a surrogate pair at character 3") as caught:
        encode([[5], "abc\ud800"])
    assert caught.value.index == 1
    with pytest.raises(InvalidPrompt, match="prompt 4 holds half"):
        PromptTokenizer(PLAIN).read("\udfff", 4)


@pytest.mark.parametrize("prompts", [["<s>hi"], [[0, 0, 5], "<s>hi"]], ids=["alone", "second"])
def test_two_bos_are_warned_of_once_by_index(prompts: list[Any]) -> None:
    with pytest.warns(UserWarning, match=f"prompt {len(prompts) - 1} starts with two BOS") as caught:
        encode([*prompts, "<s>again"])
    assert len(caught) == 1


def test_one_bos_is_not_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encode(["hi", CHAT[:1], [0, 0]])
        encode(["<s>hi"], tokenizer=PLAIN)


def test_special_ids_are_those_of_tokenizer_and_config() -> None:
    assert PromptTokenizer(tiny_tokenizer(), special_ids=[90, 1]).special_ids.tolist() == [0, 1, 2, 3, 90]
    assert PromptTokenizer(None).special_ids.tolist() == []


def choose(prompt: Any, **spec: Any) -> list[int]:
    tokenizer = PromptTokenizer(tiny_tokenizer(), context_length=20, vocabulary=97)
    asked = CaptureSpec(**spec)
    (tokens,) = tokenizer.encode(as_prompts([prompt]), asked, 4)
    return [int(position) for position in tokenizer.choose(tokens, asked, 4)]


def test_positions_are_chosen_by_the_spec_and_special_tokens_left_out_by_id() -> None:
    assert choose("abc") == [0, 1, 2, 3]
    assert choose("abc", exclude_special_tokens=True) == [1, 2, 3]
    assert choose([5, 1, 6, 1], positions="last", exclude_special_tokens=True) == [2]
    assert choose("abc", positions=lambda ids: ids == ids.max()) == [3]
    with pytest.raises(InvalidPositions, match="prompt 4"):
        choose([0, 1, 2], exclude_special_tokens=True)


def test_a_prompts_own_positions_win() -> None:
    prompt = Prompt(token_ids=[0, 5, 6], positions=[0, -1])

    assert choose(prompt, positions="last", exclude_special_tokens=True) == [0, 2]
    for positions, reason in (([3], "position 3 is outside"), ([], "leaves none")):
        with pytest.raises(InvalidPositions, match=f"prompt 4: .*{reason}"):
            choose(Prompt(token_ids=[0, 5, 6], positions=positions))


def test_a_role_means_nothing_in_a_text() -> None:
    with pytest.raises(InvalidPositions, match="prompt 4 is not chat messages, so positions 'role:user'"):
        choose("hello", positions="role:user")


def test_a_roles_positions_move_with_what_is_cut() -> None:
    whole = len("[user] hello\n[assistant] hi\n") + 1

    assert choose(CHAT, positions="role:assistant", truncate="left") == [20 - 3, 20 - 2]
    assert choose(CHAT, positions="role:user", truncate="left") == [
        p - (whole - 20) for p in range(8, 13) if p >= whole - 20
    ]
    with pytest.raises(InvalidPositions, match="leaves none of its 20 tokens"):
        choose(CHAT, positions="role:assistant", truncate="right")
