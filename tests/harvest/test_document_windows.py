"""Documents in windows: every token once, in order, with where it came from; BOS where the policy says (case V21)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamtap.engines.tokenizing import PromptTokenizer
from streamtap.errors import InvalidInput, InvalidPrompt
from streamtap.harvest.plan import Tokenised, read_prompts
from streamtap.harvest.windows import Document, windows
from streamtap.spec import Prompt
from streamtap.testing.characters import BOS, VOCABULARY, CharacterTokenizer

EOS = 1


class EndingTokenizer(CharacterTokenizer):
    """Also puts EOS behind a text."""

    def __call__(self, texts: Any, *, add_special_tokens: bool = True, **more: Any) -> dict[str, Any]:
        found = super().__call__(texts, add_special_tokens=add_special_tokens, **more)
        if add_special_tokens and not isinstance(texts, str):
            found["input_ids"] = [[*each, EOS] for each in found["input_ids"]]
        return found


class BareTokenizer(CharacterTokenizer):
    """Adds nothing."""

    bos_token_id = None  # type: ignore[assignment]

    def __call__(self, texts: Any, *, add_special_tokens: bool = True, **more: Any) -> dict[str, Any]:
        return super().__call__(texts, add_special_tokens=False, **more)


def tokenizer_of(kind: Any = CharacterTokenizer, context: int | None = 64) -> PromptTokenizer:
    return PromptTokenizer(kind(), context_length=context, vocabulary=VOCABULARY)


TOKENIZER = tokenizer_of()


def ids_of(text: str) -> list[int]:
    return [int(each) for each in TOKENIZER.read(text, 0, special_tokens=False)]


def taken_apart(found: Sequence[Tokenised], *, lead: int = 1) -> dict[int, list[int]]:
    """Each document's tokens, put together again by what the windows say of themselves."""
    whole: dict[int, dict[int, int]] = {}
    for each in found:
        assert each.segments is not None
        says = each.segments
        assert says.starts[0] in (0, lead)
        stops = [*says.starts[1:].tolist(), len(each.token_ids)]
        for document, offset, start, stop in zip(says.documents, says.offsets, says.starts, stops, strict=True):
            for i, token in enumerate(each.token_ids[start:stop]):
                assert int(offset) + i not in whole.setdefault(int(document), {}), "a token stands there twice"
                whole[int(document)][int(offset) + i] = int(token)
    for parts in whole.values():
        assert sorted(parts) == list(range(len(parts))), "a token is missing"
    return {document: [parts[i] for i in range(len(parts))] for document, parts in whole.items()}


def test_a_window_never_crosses_documents() -> None:
    found = list(windows(["abcde", "fg"], TOKENIZER, context=4))

    assert [each.token_ids.tolist() for each in found] == [
        [BOS, *ids_of("abc")],
        [BOS, *ids_of("de")],
        [BOS, *ids_of("fg")],
    ]
    says = [each.segments for each in found]
    assert [s and (s.documents.tolist(), s.offsets.tolist(), s.starts.tolist()) for s in says] == [
        ([0], [0], [1]),
        ([0], [3], [1]),
        ([1], [0], [1]),
    ]
    assert {each.cut_from for each in found} == {0}


def test_packed_windows_are_full_and_say_where_documents_begin() -> None:
    found = list(windows(["abcde", "fg"], TOKENIZER, context=4, pack=True))

    assert [each.token_ids.tolist() for each in found] == [
        [BOS, *ids_of("abc")],
        [BOS, *ids_of("def")],
        [BOS, *ids_of("g")],
    ]
    says = found[1].segments
    assert says is not None
    assert (says.documents.tolist(), says.offsets.tolist(), says.starts.tolist()) == ([0, 1], [3, 0], [1, 3])
    assert [array.dtype for array in (says.documents, says.offsets, says.starts)] == [np.int64, np.int64, np.int32]


@given(
    st.lists(st.text("abcdefgh", max_size=30), min_size=1, max_size=12),
    st.integers(2, 20),
    st.booleans(),
    st.booleans(),
    st.sampled_from([CharacterTokenizer, BareTokenizer, EndingTokenizer]),
)
def test_every_token_is_there_once(texts: list[str], context: int, pack: bool, special: bool, kind: Any) -> None:
    tokenizer = tokenizer_of(kind)
    found = list(windows(texts, tokenizer, context=context, pack=pack, add_special_tokens=special))

    tail = [EOS] if special and kind is EndingTokenizer else []
    expected = {i: ids_of(text) + tail for i, text in enumerate(texts) if text}
    assert taken_apart(found) == expected
    assert all(len(each.token_ids) <= context for each in found)
    if pack:
        assert all(len(each.token_ids) == context for each in found[:-1])
    else:
        assert all(each.segments is not None and len(each.segments.documents) == 1 for each in found)
    begins = special and kind is not BareTokenizer
    for each in found:
        assert np.flatnonzero(each.token_ids == BOS).tolist() == ([0] if begins else [])


def test_a_document_that_fits_is_the_prompt() -> None:
    """So that cutting a corpus of short texts changes nothing but what is said of them."""
    texts = ["abc", "hello there", "x"]
    for kind in (CharacterTokenizer, BareTokenizer, EndingTokenizer):
        for special in (True, False):
            tokenizer = tokenizer_of(kind)
            prompts = read_prompts(texts, tokenizer, add_special_tokens=special)
            found = windows(texts, tokenizer, context=64, add_special_tokens=special)
            assert [each.token_ids.tolist() for each in found] == [each.token_ids.tolist() for each in prompts]


def test_a_document_with_its_own_bos_gets_no_second_one_and_none_in_the_middle() -> None:
    pretokenised = [[BOS, *ids_of("abcde")], [BOS, *ids_of("fg")], ids_of("hi")]

    apart = [each.token_ids.tolist() for each in windows(pretokenised, TOKENIZER, context=4)]
    packed = list(windows(pretokenised, TOKENIZER, context=5, pack=True))
    untouched = [
        each.token_ids.tolist() for each in windows(pretokenised, TOKENIZER, context=4, add_special_tokens=False)
    ]

    assert apart == [[BOS, *ids_of("abc")], [BOS, *ids_of("de")], [BOS, *ids_of("fg")], ids_of("hi")]
    assert [each.token_ids.tolist() for each in packed] == [
        [BOS, *ids_of("abcd")],
        [BOS, *ids_of("efgh")],
        [BOS, *ids_of("i")],
    ]
    assert untouched == [[BOS, *ids_of("abc")], ids_of("de"), [BOS, *ids_of("fg")], ids_of("hi")]
    assert taken_apart(packed) == {0: ids_of("abcde"), 1: ids_of("fg"), 2: ids_of("hi")}


def test_a_chat_begins_as_its_template_writes_it() -> None:
    chat = [{"role": "user", "content": "hello"}]
    found = list(windows([chat], TOKENIZER, context=64))

    assert [each.token_ids.tolist() for each in found] == [
        each.token_ids.tolist() for each in read_prompts([chat], TOKENIZER)
    ]


def test_empty_documents_give_no_window_and_keep_their_row() -> None:
    documents = [Document(0, None), Document(1, "ab"), Document(2, ""), Document(7, Prompt(text="cd")), Document(8, [])]

    assert taken_apart(list(windows(documents, TOKENIZER, context=8))) == {1: ids_of("ab"), 7: ids_of("cd")}
    assert list(windows([Document(0, None)], TOKENIZER, context=8)) == []


def test_an_error_names_the_documents_row() -> None:
    good = [Document(3 * i, "ab") for i in range(5)]
    with pytest.raises(InvalidPrompt, match=r"prompt 41 holds token id 9999"):
        list(windows([*good, Document(41, [5, 9999])], TOKENIZER, context=8))
    with pytest.raises(InvalidPrompt, match=r"prompt 2 is of type int"):
        list(windows(["a", "b", 5], TOKENIZER, context=8))  # type: ignore[list-item]


def test_a_text_of_which_nothing_is_left_is_an_empty_document() -> None:
    class Forgetful(CharacterTokenizer):
        def __call__(self, texts: Any, *, add_special_tokens: bool = True, **more: Any) -> dict[str, Any]:
            kept = texts.replace("?", "") if isinstance(texts, str) else texts
            return super().__call__(kept, add_special_tokens=add_special_tokens, **more)

    found = list(windows(["ab", "???", "cd"], tokenizer_of(Forgetful), context=8))

    assert taken_apart(found) == {0: ids_of("ab"), 2: ids_of("cd")}


@pytest.mark.parametrize("pack", [False, True])
def test_max_tokens_stops_before_the_window_that_would_be_more(pack: bool) -> None:
    texts = ["abcdefg", "hij"] * 5
    whole = list(windows(texts, TOKENIZER, context=4, pack=pack))
    for most in range(4, 60):
        some = list(windows(texts, TOKENIZER, context=4, pack=pack, max_tokens=most))
        total = sum(len(each.token_ids) for each in some)
        assert total <= most
        assert [each.token_ids.tolist() for each in some] == [each.token_ids.tolist() for each in whole[: len(some)]]
        if len(some) < len(whole):
            assert total + len(whole[len(some)].token_ids) > most
    with pytest.raises(InvalidInput, match=r"the first has 4 tokens, more than max_tokens=3"):
        list(windows(texts, TOKENIZER, context=4, pack=pack, max_tokens=3))


@pytest.mark.parametrize(
    ("context", "said"),
    [
        (0, "context must be a whole number of tokens, at least 1; got 0"),
        (True, "context must be a whole number of tokens, at least 1; got True"),
        (65, "context must be at most the model's, 64 tokens; got 65"),
        (1, "context must be more than the 1 tokens that begin each window; got 1"),
    ],
)
def test_a_context_that_cannot_be_is_refused_at_once(context: Any, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        windows(["abc"], TOKENIZER, context=context)


def test_documents_are_read_as_they_are_needed() -> None:
    read: list[int] = []

    def documents() -> Any:
        for i in range(100_000):
            read.append(i)
            yield "abc"

    found = windows(documents(), TOKENIZER, context=8)
    for _ in range(10):
        next(found)

    assert len(read) < 2000


def test_long_documents_are_tokenised_a_few_at_a_time() -> None:
    sizes: list[int] = []

    class Watched(CharacterTokenizer):
        def __call__(self, texts: Any, **more: Any) -> dict[str, Any]:
            sizes.append(sum(map(len, texts)))
            return super().__call__(texts, **more)

    book = "a" * (1 << 21)
    for _ in windows([book] * 5, tokenizer_of(Watched), context=64):
        pass

    assert max(sizes) <= 3 * len(book)
