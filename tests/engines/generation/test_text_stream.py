from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from streamtap.engines.generation.pieces import Pieces
from streamtap.engines.generation.text import TextStream, decoded, text_offsets, token_text
from streamtap.testing.tokenizers import tiny_tokenizer

#: The same examples in every run, however busy the machine.
STEADY = settings(deadline=None, derandomize=True, max_examples=40, suppress_health_check=list(HealthCheck))
EMOJI = "\U0001f600"
MARK = "\ufffd"


def _fast(vocabulary: dict[str, int], decoder: Any) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def _numbered(tokens: Sequence[str]) -> dict[str, int]:
    return {token: i for i, token in enumerate(dict.fromkeys(["<unk>", *tokens]))}


def _byte_level() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return _fast(_numbered([*alphabet, "Ġthe", "Ġcat", "ĠĠ"]), decoders.ByteLevel())


WORDS = ["▁", "▁▁", "▁the", "cat", "▁cat", "é", "a", "b", EMOJI]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _sentencepiece() -> PreTrainedTokenizerFast:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return _fast(_numbered([*WORDS, *BYTES]), decoders.Sequence(steps))


def _metaspace() -> PreTrainedTokenizerFast:
    return _fast(_numbered(WORDS), decoders.Metaspace())


def _suffixed() -> PreTrainedTokenizerFast:
    return _fast(_numbered(["the</w>", "ca", "t</w>", "a", "b</w>"]), decoders.BPEDecoder(suffix="</w>"))


def _wordpiece() -> PreTrainedTokenizerFast:
    return _fast(_numbered(["the", "cat", "##s", ".", "n", "'", "t"]), decoders.WordPiece())


TOKENIZERS = {
    "byte-level": _byte_level(),
    "sentencepiece": _sentencepiece(),
    "metaspace": _metaspace(),
    "suffixed": _suffixed(),
    "wordpiece": _wordpiece(),
    "characters": tiny_tokenizer(),
}
every_tokenizer = pytest.mark.parametrize("name", TOKENIZERS)


def _id(name: str, token: str) -> int:
    return int(TOKENIZERS[name].convert_tokens_to_ids(token))


def _ids_of_bytes(text: str) -> list[int]:
    return TOKENIZERS["byte-level"].encode(text, add_special_tokens=False)


def _fallback(text: str) -> list[int]:
    return [_id("sentencepiece", f"<0x{byte:02X}>") for byte in text.encode()]


def _pushed(stream: TextStream, ids: Sequence[int]) -> list[str]:
    return [*map(stream.push, ids), stream.end()]


def _one_shot(name: str, ids: Sequence[int], skip: bool = True) -> str:
    known = [each for each in ids if each < len(TOKENIZERS[name])]
    return TOKENIZERS[name].decode(known, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def _draw_ids(data: st.DataObject, name: str, most: int) -> list[int]:
    """Ids of the whole vocabulary and two beyond it; from a few tokens only, so that runs of one kind are common."""
    few = data.draw(st.lists(st.integers(0, len(TOKENIZERS[name]) + 1), min_size=1, max_size=8))
    return data.draw(st.lists(st.sampled_from(few), max_size=most))


@every_tokenizer
@given(data=st.data(), skip=st.booleans())
@STEADY
def test_the_stream_is_the_one_shot_decode(name: str, data: st.DataObject, skip: bool) -> None:
    ids = _draw_ids(data, name, 150)

    stream = TextStream(TOKENIZERS[name], skip_special_tokens=skip)
    pieces = _pushed(stream, ids)

    assert "".join(pieces) == _one_shot(name, ids, skip) == decoded(TOKENIZERS[name], ids, skip)
    assert stream.offset == sum(map(len, pieces))


@every_tokenizer
def test_a_long_stream_is_the_one_shot_decode(name: str) -> None:
    draws = random.Random(4)
    ids = [draws.randrange(len(TOKENIZERS[name])) for _ in range(600)]

    assert "".join(_pushed(TextStream(TOKENIZERS[name]), ids)) == _one_shot(name, ids)


@every_tokenizer
@given(data=st.data())
@STEADY
def test_with_a_prompt_only_what_follows_is_given(name: str, data: st.DataObject) -> None:
    prompt, ids = _draw_ids(data, name, 60), _draw_ids(data, name, 60)

    joined = "".join(_pushed(TextStream(TOKENIZERS[name], prompt_ids=prompt), ids))

    before, whole = _one_shot(name, prompt), _one_shot(name, [*prompt, *ids])
    same = next((i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), len(before))
    assert joined == whole[same:]


def test_an_emoji_of_four_tokens_comes_whole() -> None:
    ids = _ids_of_bytes(f"a{EMOJI}b")
    assert len(ids) == 6

    assert _pushed(TextStream(TOKENIZERS["byte-level"]), ids) == ["a", "", "", "", EMOJI, "b", ""]


def test_a_stream_that_ends_in_a_character_shows_what_the_decode_shows() -> None:
    ids = _ids_of_bytes(f"a{EMOJI}")[:-1]

    assert _pushed(TextStream(TOKENIZERS["byte-level"]), ids) == ["a", "", "", "", MARK]


def test_a_token_with_a_space_after_an_open_character() -> None:
    ids = [*_ids_of_bytes(EMOJI)[:2], _id("byte-level", "Ġthe")]

    assert _pushed(TextStream(TOKENIZERS["byte-level"]), ids) == ["", "", f"{MARK} the", ""]


def test_a_replacement_character_of_the_text_itself_is_kept() -> None:
    ids = _ids_of_bytes(f"a{MARK}b")

    assert "".join(_pushed(TextStream(TOKENIZERS["byte-level"]), ids)) == f"a{MARK}b"


def test_a_prompt_may_end_inside_a_character() -> None:
    tokenizer, ids = TOKENIZERS["byte-level"], _ids_of_bytes(f"a{EMOJI}b")

    assert _pushed(TextStream(tokenizer, prompt_ids=ids[:3]), ids[3:]) == ["", EMOJI, "b", ""]


def test_byte_pieces_are_judged_as_one_run() -> None:
    tokenizer, cat = TOKENIZERS["sentencepiece"], _id("sentencepiece", "cat")
    emoji = _fallback(EMOJI)

    assert _pushed(TextStream(tokenizer), [*emoji, *emoji, cat]) == [*[""] * 8, f"{EMOJI}{EMOJI}cat", ""]
    assert _pushed(TextStream(tokenizer), [*emoji, *emoji[:1], cat]) == [*[""] * 5, MARK * 5 + "cat", ""]


def test_a_prompt_that_ends_in_byte_pieces_keeps_them() -> None:
    cat = _id("sentencepiece", "cat")

    stream = TextStream(TOKENIZERS["sentencepiece"], prompt_ids=[cat, *_fallback(EMOJI)])

    assert _pushed(stream, [cat]) == ["cat", ""]


@pytest.mark.parametrize("name", ["sentencepiece", "metaspace"])
def test_the_leading_space_depends_on_the_prompt(name: str) -> None:
    tokenizer, the, bos = TOKENIZERS[name], _id(name, "▁the"), _id(name, "<s>")

    assert _pushed(TextStream(tokenizer), [the, the]) == ["the", " the", ""]
    assert _pushed(TextStream(tokenizer, prompt_ids=[bos, the]), [the]) == [" the", ""]
    assert _pushed(TextStream(tokenizer, prompt_ids=[bos]), [the]) == ["the", ""]


def test_special_tokens_are_shown_when_asked() -> None:
    bos, a, tool = (_id("byte-level", token) for token in ("<s>", "a", "<tool>"))

    assert _pushed(TextStream(TOKENIZERS["byte-level"]), [bos, a, tool]) == ["", "a", "<tool>", ""]
    assert _pushed(TextStream(TOKENIZERS["byte-level"], skip_special_tokens=False), [bos, a]) == ["<s>", "a", ""]


def test_without_a_tokenizer_there_is_no_text() -> None:
    assert _pushed(TextStream(None, prompt_ids=[1, 2]), [3, 4]) == ["", "", ""]
    assert decoded(None, [1, 2]) == token_text(None, 1) == ""


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("byte-level", _ids_of_bytes("plain text ") * 100),
        ("byte-level", _ids_of_bytes(EMOJI) * 300),
        ("byte-level", _ids_of_bytes(EMOJI)[:1] * 1000),
        ("byte-level", _ids_of_bytes(EMOJI)[1:2] * 1000),
        ("byte-level", [_id("byte-level", "<s>")] * 1000),
        ("sentencepiece", [*_fallback(EMOJI * 12), _id("sentencepiece", "▁")] * 20),
        ("sentencepiece", [*_fallback("é" * 6)[:-1], _id("sentencepiece", "▁")] * 80),
        ("metaspace", [_id("metaspace", "▁")] * 1000),
    ],
)
def test_a_token_costs_the_same_however_long_the_text(
    name: str, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    plain = Pieces.decoded

    def counted(self: Pieces, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        read.append(len(token_ids))
        return plain(self, token_ids, skip_special_tokens)

    monkeypatch.setattr(Pieces, "decoded", counted)
    joined = "".join(_pushed(TextStream(TOKENIZERS[name]), ids))

    assert joined == _one_shot(name, ids)
    assert sum(read) < 130 * len(ids)
    assert max(read) < 200


def test_tokens_without_a_text_do_not_hide_what_stood_before() -> None:
    steps = [decoders.Replace("é", ""), decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer = _fast(_numbered(WORDS), decoders.Sequence(steps))
    cat, nothing, the = tokenizer.convert_tokens_to_ids(["cat", "é", "▁the"])

    assert "".join(_pushed(TextStream(tokenizer), [cat, *[nothing] * 100, the])) == "cat the"


def test_a_token_as_text_keeps_its_leading_space() -> None:
    assert token_text(TOKENIZERS["sentencepiece"], _id("sentencepiece", "▁the")) == " the"
    assert token_text(TOKENIZERS["sentencepiece"], _id("sentencepiece", "▁")) == " "
    assert token_text(TOKENIZERS["metaspace"], _id("metaspace", "▁▁")) == "  "
    assert token_text(TOKENIZERS["byte-level"], _id("byte-level", "Ġcat")) == " cat"
    assert token_text(TOKENIZERS["wordpiece"], _id("wordpiece", "##s")) == "s"
    assert token_text(TOKENIZERS["characters"], _id("characters", "x")) == "x"


def test_a_token_that_is_no_text_is_shown_as_well() -> None:
    assert token_text(TOKENIZERS["byte-level"], _id("byte-level", "<s>")) == "<s>"
    assert token_text(TOKENIZERS["byte-level"], _ids_of_bytes(EMOJI)[0]) == MARK
    assert token_text(TOKENIZERS["sentencepiece"], _fallback(EMOJI)[0]) == MARK
    assert token_text(TOKENIZERS["sentencepiece"], _fallback("A")[0]) == "A"
    assert token_text(TOKENIZERS["byte-level"], 100_000) == ""


def test_offsets_are_where_the_characters_begin() -> None:
    ids = [_id("byte-level", "<s>"), *_ids_of_bytes(f"ab{EMOJI}c")]

    assert text_offsets(TOKENIZERS["byte-level"], ids) == [0, 0, 1, 2, 2, 2, 2, 3]
