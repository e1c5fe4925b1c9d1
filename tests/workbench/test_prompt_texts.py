from __future__ import annotations

import pytest

from streamtap.errors import DatasetDamaged, InvalidInput
from streamtap.spec import Prompt, as_prompts
from streamtap.workbench.prompt_texts import dataset_texts, prompt_of

CHAT = [{"role": "system", "content": 'Sei "kurz".\n'}, {"role": "user", "content": "Größe? 🌍"}]


def test_a_text_and_a_chat_come_back() -> None:
    texts = dataset_texts(as_prompts(["The sky", CHAT]))

    assert texts[0] == "The sky"
    assert texts[1].startswith('[{"role": "system", "content": "Sei \\"kurz\\".\\n"}')
    assert "Größe? 🌍" in texts[1]
    assert prompt_of(texts[0], is_chat=False).text == "The sky"
    assert prompt_of(texts[1], is_chat=True).messages == as_prompts([CHAT])[0].messages
    assert prompt_of(texts[1], is_chat=False).text == texts[1]


def test_the_first_prompt_without_a_text_is_named() -> None:
    with pytest.raises(InvalidInput, match="prompt 1 is token ids"):
        dataset_texts([Prompt(text="a"), Prompt(token_ids=[1]), Prompt(token_ids=[2])])


@pytest.mark.parametrize("text", ["The sky", "{}", "[]", "[1]", '[{"role": "user"}]', "null", ""])
def test_a_chat_that_is_none_is_damage(text: str) -> None:
    with pytest.raises(DatasetDamaged, match="it is not the JSON of one"):
        prompt_of(text, is_chat=True)
