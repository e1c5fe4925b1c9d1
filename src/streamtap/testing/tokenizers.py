"""A small real tokenizer, built in memory: one token a character.

Its vocabulary is that of the tiny models, so that texts and chats can be run on them.
"""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD, UNKNOWN = "<s>", "</s>", "<pad>", "<unk>"
_SPECIALS = (BOS, EOS, PAD, UNKNOWN)
_LEFT_OUT = "^`~"  # three printable characters too many for 97 entries
_CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127) if chr(code) not in _LEFT_OUT)

#: Renders BOS itself, as most released templates do: a tokenizer that adds its own makes two.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def tiny_tokenizer(
    *, adds_bos: bool = True, chat_template: str | None = CHAT_TEMPLATE, padding_side: str = "right"
) -> PreTrainedTokenizerFast:
    """A fast tokenizer of 97 entries: four special tokens, a newline, and 92 ASCII characters.

    Args:
        adds_bos: Whether encoding a plain text puts BOS (id 0) in front.
        chat_template: The Jinja template of chats, or None for a tokenizer without one.
        padding_side: Where the tokenizer would pad, "left" or "right".
    """
    vocabulary = {token: i for i, token in enumerate((*_SPECIALS, *_CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, vocabulary[BOS])]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNKNOWN,
        padding_side=padding_side,
        chat_template=chat_template,
    )
