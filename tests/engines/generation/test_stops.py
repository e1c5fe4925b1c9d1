from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamtap.engines.generation.stops import StopMatcher
from streamtap.errors import InvalidInput

#: The same examples in every run, however busy the machine.
STEADY = settings(deadline=None, derandomize=True, max_examples=100, suppress_health_check=list(HealthCheck))
LETTERS = st.text("ab", max_size=30)


def _released(stops: tuple[str, ...], chunks: list[str]) -> tuple[list[str], str | None]:
    """What came out with each chunk and at the end, and the match."""
    matcher, pieces = StopMatcher(stops), []
    for chunk in chunks:
        piece, matched = matcher.push(chunk)
        pieces.append(piece)
        if matched is not None:
            return [*pieces, matcher.end()], matched
    return [*pieces, matcher.end()], None


def _found(stops: tuple[str, ...], text: str) -> tuple[str, str | None]:
    """The same of the whole text: the stop string that is complete first; of two at once, the one that begins first."""
    places = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    if not places:
        return text, None
    _, start, stop = min(places)
    return text[:start], stop


@given(stops=st.lists(st.text("ab", min_size=1, max_size=6), max_size=4), chunks=st.lists(LETTERS, max_size=12))
@STEADY
def test_any_cut_gives_what_the_whole_text_gives(stops: list[str], chunks: list[str]) -> None:
    pieces, matched = _released(tuple(stops), chunks)

    assert ("".join(pieces), matched) == _found(tuple(stops), "".join(chunks))


@given(stops=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4), text=LETTERS)
@STEADY
def test_only_the_start_of_a_stop_string_is_held(stops: list[str], text: str) -> None:
    matcher = StopMatcher(tuple(stops))
    seen = given_out = ""
    for character in text:
        piece, matched = matcher.push(character)
        seen, given_out = seen + character, given_out + piece
        if matched is not None:
            return
        open_ends = [n for n in range(len(seen) + 1) if any(stop.startswith(seen[len(seen) - n :]) for stop in stops)]
        assert given_out == seen[: len(seen) - max(open_ends)]


def test_nothing_of_a_stop_string_is_shown() -> None:
    pieces, matched = _released(("own fox",), list("The quick brown fox jumps"))

    assert ("".join(pieces), matched) == ("The quick br", "own fox")


def test_what_was_held_comes_at_the_end() -> None:
    assert _released(("abc",), ["ab"]) == (["", "ab"], None)


def test_what_was_held_comes_when_it_is_disproved() -> None:
    assert _released(("abc",), ["xab", "d", "ab"]) == (["x", "abd", "", "ab"], None)


def test_a_false_start_may_hold_the_true_one() -> None:
    assert _released(("aab",), ["a", "a", "a", "b"]) == (["", "", "a", "", ""], "aab")


def test_of_two_that_end_together_the_longer_is_meant() -> None:
    assert _released(("fox", "own fox"), ["brown fox"]) == (["br", ""], "own fox")


def test_the_one_that_is_complete_first_ends_the_text() -> None:
    assert _released(("abcde", "c"), ["abcde"]) == (["ab", ""], "c")
    assert _released(("abcde", "c"), list("abcde")) == (["", "", "ab", ""], "c")


def test_nothing_follows_a_match() -> None:
    matcher = StopMatcher(("b",))

    assert matcher.push("ab") == ("a", "b")
    assert matcher.push("cc") == ("", "b")
    assert matcher.end() == ""


def test_without_stop_strings_all_passes() -> None:
    assert _released((), ["a", "", "b"]) == (["a", "", "b", ""], None)


def test_a_long_stop_string_costs_what_was_read_of_it() -> None:
    stop = "ab" * 500_000

    assert _released((stop,), ["ababx"]) == (["ababx", ""], None)
    assert _released(("a" * 100_000 + "b",), ["a" * 200_000, "b"])[1] == "a" * 100_000 + "b"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidInput, match="a stop string is empty; expected at least one character."):
        StopMatcher(("a", ""))
