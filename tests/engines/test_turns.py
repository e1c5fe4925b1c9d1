"""The tokens of one role's messages: all of its text, and none of the template's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from streamtap.engines.tokenizing import PromptTokenizer
from streamtap.engines.turns import role_positions
from streamtap.errors import InvalidPositions, InvalidPrompt
from streamtap.spec import CaptureSpec, Prompt
from streamtap.testing.tokenizers import CHAT_TEMPLATE, tiny_tokenizer

TURNS = (("system", "be brief"), ("user", "what is 2 + 2?"), ("assistant", "4"), ("user", "sure?"))
STRIPPING = CHAT_TEMPLATE.replace("message['content']", "message['content'] | trim")


def texts(
    messages: tuple[tuple[str, str], ...], role: str, template: str = CHAT_TEMPLATE, **spec: Any
) -> tuple[str, list[int]]:
    """The text under the positions found, and the positions."""
    tokenizer = PromptTokenizer(tiny_tokenizer(chat_template=template))
    prompt, asked = Prompt(messages=messages), CaptureSpec(**spec)
    positions = role_positions(tokenizer, prompt, role, asked, 3)
    (tokens,) = tokenizer.encode([prompt], asked)
    assert positions.dtype == np.int32
    return tokenizer.tokenizer.decode(tokens.token_ids[positions]), positions.tolist()


@pytest.mark.parametrize(
    ("role", "text"), [("system", "be brief"), ("assistant", "4"), ("user", "what is 2 + 2?sure?")]
)
@pytest.mark.parametrize("generation_prompt", [False, True])
@pytest.mark.parametrize("template", [CHAT_TEMPLATE, STRIPPING], ids=["plain", "stripping"])
def test_a_role_has_the_text_of_all_its_messages(role: str, text: str, generation_prompt: bool, template: str) -> None:
    found, positions = texts(TURNS, role, template, generation_prompt=generation_prompt)

    assert found == text
    assert positions == sorted(set(positions))


@pytest.mark.parametrize("content", ["a", "user", "[user]", "assistant", "] ", "s", "[assistant] a"])
def test_a_message_that_reads_as_the_templates_own_words_is_found_where_it_stands(content: str) -> None:
    found, positions = texts((("user", content), ("assistant", content)), "assistant")

    assert found == content
    start = 1 + len(f"[user] {content}\n[assistant] ")
    assert positions == list(range(start, start + len(content)))


def test_equal_messages_of_two_roles_are_told_apart() -> None:
    turns = (("user", "yes"), ("assistant", "yes"), ("user", "yes"))
    (_, of_user), (_, of_assistant) = texts(turns, "user"), texts(turns, "assistant")

    assert not set(of_user) & set(of_assistant)
    assert (len(of_user), len(of_assistant)) == (6, 3)


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, STRIPPING], ids=["plain", "stripping"])
def test_blanks_around_a_message_belong_to_it_where_the_template_keeps_them(template: str) -> None:
    for content in ("  hi \n", "hi\n", " hi"):
        found = texts((("user", content), ("assistant", "\nyes ")), "user", template)[0]
        assert found == (content if template == CHAT_TEMPLATE else "hi")


def test_an_empty_message_has_no_token() -> None:
    assert texts((("user", "hi"), ("assistant", "")), "assistant") == ("", [])


def test_messages_that_a_template_puts_together_are_found() -> None:
    merged = (
        "{{ bos_token }}[INST] <<{{ messages[0]['content'] }}>> {{ messages[1]['content'] }} [/INST]"
        "{% for message in messages[2:] %} {{ message['content'] }}{% endfor %}"
    )

    assert texts(TURNS, "system", merged)[0] == "be brief"
    assert texts(TURNS, "user", merged)[0] == "what is 2 + 2?sure?"


@pytest.mark.parametrize(
    ("template", "number"),
    [
        (CHAT_TEMPLATE.replace("message['content']", "message['content'] | upper"), 0),
        (CHAT_TEMPLATE.replace("message['content']", "message['content'].replace('2', '3')"), 1),
        (CHAT_TEMPLATE.replace("in messages", "in messages[1:]"), 0),
        (CHAT_TEMPLATE.replace("in messages", "in messages | reverse"), 1),
        (CHAT_TEMPLATE.replace("\n{% endfor", "{{ message['content'] }}\n{% endfor"), 0),
    ],
    ids=["upper", "replaced", "left out", "reversed", "twice"],
)
def test_a_template_that_rewrites_a_message_is_refused_by_its_number(template: str, number: int) -> None:
    with pytest.raises(InvalidPositions, match=rf"prompt 3: the chat template rewrites message {number}.*as numbers"):
        texts(TURNS, "user", template)


def test_a_role_that_nobody_has_is_refused_with_those_there_are() -> None:
    with pytest.raises(
        InvalidPositions, match=r"prompt 3 has no message of role 'tool'; it has \['assistant', 'system"
    ):
        texts(TURNS, "tool")


def test_a_slow_tokenizer_does_not_know_where_its_tokens_stand() -> None:
    class Slow:
        is_fast, chat_template = False, CHAT_TEMPLATE

        def apply_chat_template(self, messages: Any, **options: Any) -> Any:
            return tiny_tokenizer().apply_chat_template(messages, **options)

    with pytest.raises(InvalidPrompt, match="prompt 3: .* fast tokenizer") as caught:
        role_positions(PromptTokenizer(Slow()), Prompt(messages=TURNS), "user", CaptureSpec(), 3)
    assert caught.value.index == 3
