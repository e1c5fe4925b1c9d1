from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamtap.cache import CacheStore
from streamtap.errors import EmptyPrompt, InvalidPositions, MissingExtra, NotCached, PromptTooLong
from streamtap.fingerprint import tokens_digest
from streamtap.spec import CaptureSpec, Prompt, as_prompts
from streamtap.testing.fake_engine import FakeEngine
from streamtap.workbench.model_source import GivenEngine
from streamtap.workbench.prompt_keys import Keyed, PromptKeys

CHAT = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]


class CountingSource(GivenEngine):
    """The engine's tokenizer, and what it was given to do."""

    def __init__(self, engine: FakeEngine) -> None:
        super().__init__(engine)
        self.encoded: list[int] = []
        self.fails: MissingExtra | None = None

    def encode(self, prompts: Sequence[Prompt], spec: CaptureSpec, first_index: int) -> Any:
        if self.fails:
            raise self.fails
        self.encoded += range(first_index, first_index + len(prompts))
        return super().encode(prompts, spec, first_index)


@pytest.fixture
def source() -> CountingSource:
    return CountingSource(FakeEngine())


@pytest.fixture
def find(tmp_path: Path, source: CountingSource) -> Callable[..., Keyed]:
    def found(prompts: Any, from_source: CountingSource = source, **spec: Any) -> Keyed:
        with CacheStore(tmp_path) as store:
            return PromptKeys(store, from_source, CaptureSpec(layers=(), **spec)).find(as_prompts(prompts))

    return found


def digest(text: str, positions: list[int] | None = None) -> bytes:
    token_ids = np.array(FakeEngine().tokenizer.tokenizer(text)["input_ids"], np.int32)
    return tokens_digest(token_ids, None if positions is None else np.array(positions, np.int32))


def test_a_text_is_tokenised_once(find: Callable[..., Keyed], source: CountingSource) -> None:
    first = find(["one", "two", "one", CHAT])
    second = find(["zero", CHAT, "two", "one", "three"])

    assert source.encoded == [0, 1, 2, 3, 0, 4]
    assert first.rows[:3] == first.tokens[:3] == [digest("one"), digest("two"), digest("one")]
    assert second.rows == [digest("zero"), first.rows[3], digest("two"), digest("one"), digest("three")]
    assert set(second.fresh) == {digest("zero"), digest("three")}


def test_no_text_is_kept(find: Callable[..., Keyed], tmp_path: Path) -> None:
    find(["a secret that nobody may read", [{"role": "user", "content": "another secret"}]])

    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert files
    assert not any(b"secret" in file.read_bytes() for file in files)


def test_what_changes_the_tokens_is_tokenised_again(find: Callable[..., Keyed], source: CountingSource) -> None:
    long = "a" * 40 + "b" * 40
    keys = {
        "plain": find(["one", CHAT]),
        "left": find([long], truncate="left"),
        "right": find([long], truncate="right"),
        "generation": find([CHAT], generation_prompt=True),
    }
    again = [find([CHAT], CountingSource(FakeEngine(named={"tokenizer": "another"})))]

    assert source.encoded == [0, 1, 0, 0, 0]
    assert keys["left"].rows != keys["right"].rows
    assert keys["generation"].rows[0] != keys["plain"].rows[1]
    assert again[0].rows == keys["plain"].rows[1:]
    assert len(again[0].fresh) == 1


@pytest.mark.parametrize("side", ["left", "right"])
def test_truncation_is_recorded(side: Any, find: Callable[..., Keyed]) -> None:
    for _ in range(2):  # tokenised, and then remembered
        keyed = find(["short", "x" * 90, [5] * 70], truncate=side)
        assert keyed.cut_from == [0, 91, 70]
    with pytest.raises(PromptTooLong, match="prompt 1 has 91 tokens"):
        find(["short", "x" * 90])


def test_a_bad_prompt_among_known_ones_is_named_by_its_place(
    find: Callable[..., Keyed], source: CountingSource
) -> None:
    find(["one", "three"])
    with pytest.raises(PromptTooLong, match="prompt 4 has"):
        find(["one", "two", "three", "four", "x" * 90, "one"])
    with pytest.raises(EmptyPrompt, match="prompt 2"):
        find(["one", "two", ""])
    assert find(["two"]).fresh  # a list with a bad prompt leaves nothing behind


def test_texts_and_chats_and_token_ids_meet_by_their_tokens(find: Callable[..., Keyed]) -> None:
    rendered = "[user] Why?\n[assistant] Because.\n"
    token_ids = FakeEngine().tokenizer.tokenizer(rendered, add_special_tokens=False)["input_ids"]
    keyed = find([CHAT, token_ids, np.array(token_ids, np.uint16), rendered])

    assert keyed.rows[0] == keyed.rows[1] == keyed.rows[2]
    assert keyed.rows[3] == digest(rendered) != keyed.rows[0]  # BOS in front


def test_positions_of_a_prompts_own_belong_to_its_key(find: Callable[..., Keyed]) -> None:
    for _ in range(2):
        keyed = find([Prompt(text="some", positions=[1, 2]), "some", Prompt(text="some", positions=[-1])])
        assert keyed.rows == [digest("some", [1, 2]), digest("some"), digest("some", [4])]
        assert keyed.tokens == [digest("some")] * 3


def test_a_mask_is_asked_each_time(find: Callable[..., Keyed], source: CountingSource) -> None:
    for wanted in (70, 80):
        keyed = find(["some", "more"], positions=lambda token_ids, w=wanted: token_ids > w)
        for text, row in zip(["some", "more"], keyed.rows, strict=True):
            token_ids = np.array(FakeEngine().tokenizer.tokenizer(text)["input_ids"], np.int32)
            assert row == tokens_digest(token_ids, np.flatnonzero(token_ids > wanted).astype(np.int32))
            assert keyed.fresh[row].positions.tolist() == np.flatnonzero(token_ids > wanted).tolist()
        assert keyed.tokens == [digest("some"), digest("more")]
    assert source.encoded == [0, 1]
    with pytest.raises(InvalidPositions, match="prompt 1: positions of the mask function leaves none"):
        find(["some", "123"], positions=lambda token_ids: token_ids > 70)


def test_a_mask_does_not_reach_special_tokens_that_are_left_out(find: Callable[..., Keyed]) -> None:
    keyed = find(["some"], positions=lambda token_ids: token_ids >= 0, exclude_special_tokens=True)

    assert keyed.rows == [digest("some", [1, 2, 3, 4])]


def test_positions_of_a_prompts_own_go_before_a_mask(find: Callable[..., Keyed]) -> None:
    keyed = find([Prompt(text="some", positions=[3]), "some"], positions=lambda token_ids: token_ids > 0)

    assert keyed.rows == [digest("some", [3]), digest("some", [1, 2, 3, 4])]
    assert keyed.tokens == [digest("some")] * 2


def test_the_turns_of_roles_are_remembered_apart(find: Callable[..., Keyed], source: CountingSource) -> None:
    rendered = "[user] Why?\n[assistant] Because.\n"
    spans = {"user": range(7, 11), "assistant": range(24, 32)}
    token_ids = np.array(FakeEngine().tokenizer.tokenizer(rendered, add_special_tokens=False)["input_ids"], np.int32)
    for _ in range(2):
        for role, span in spans.items():
            keyed = find([CHAT], positions=f"role:{role}")
            assert keyed.rows == [tokens_digest(token_ids, np.array(span, np.int32))]
            assert keyed.tokens == [tokens_digest(token_ids)]
    assert source.encoded == [0, 0]
    with pytest.raises(InvalidPositions, match="prompt 1 is not chat messages"):
        find([CHAT, "text"], positions="role:user")


def test_keys_come_from_the_store_or_from_now(tmp_path: Path, source: CountingSource) -> None:
    with CacheStore(tmp_path) as store:
        finder = PromptKeys(store, source, CaptureSpec(layers=()))
        finder.find(as_prompts(["one"]))
        keyed = finder.find(as_prompts(["two", "one"]))
        keys = finder.keys([keyed.rows[i] for i in (1, 0, 1)], keyed.fresh)

        assert [key.digest for key in keys] == [digest("one"), digest("two"), digest("one")]
        assert keys[0].token_ids.tolist() == FakeEngine().tokenizer.tokenizer("one")["input_ids"]
        # The arrays are those that were made, not copies of them.
        assert keys[1].token_ids is keyed.fresh[digest("two")].token_ids


def test_positions_are_checked_by_the_callers_places(tmp_path: Path, source: CountingSource) -> None:
    with CacheStore(tmp_path) as store:
        finder = PromptKeys(store, source, CaptureSpec(layers=(), positions=[4]))
        keyed = finder.find(as_prompts(["some", "me"]))
        keys = finder.keys(keyed.rows, keyed.fresh)

        finder.check_positions(keys[:1], [7])
        with pytest.raises(InvalidPositions, match="prompt 9: position 4 is outside its 3 tokens"):
            finder.check_positions(keys, [7, 9])


def test_a_text_never_seen_is_not_cached_where_nothing_can_tokenise_it(
    find: Callable[..., Keyed], source: CountingSource
) -> None:
    known = find(["one", "two"])
    source.fails = MissingExtra("running a model here needs torch: pip install 'streamtap[local]'.")

    assert find(["two", "one"]).rows == known.rows[::-1]
    with pytest.raises(NotCached, match=r"prompt 1 .* not in the cache, and running a model here needs .*\[local\]"):
        find(["one", "new", "two"])
