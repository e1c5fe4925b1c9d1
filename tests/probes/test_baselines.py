"""Text baselines show what the words alone give away."""

from __future__ import annotations

import numpy as np
import pytest

from streamtap.errors import InvalidRows
from streamtap.probes.baselines import bag_of_words, majority, text_length

RANDOM = np.random.default_rng(4)
WORDS = [f"word{i}" for i in range(40)]


def sentences(n: int, giveaway: str) -> tuple[list[str], np.ndarray]:
    labels = np.arange(n) % 2
    texts = []
    for label in labels:
        words = list(RANDOM.choice(WORDS, size=8))
        texts.append(" ".join([*words[:4], giveaway if label else "plain", *words[4:]]))
    return texts, labels


@pytest.mark.parametrize("giveaway", ["however", "I", "7", "?"])
def test_the_presence_of_one_word_is_found(giveaway: str) -> None:
    train, test = sentences(200, giveaway), sentences(100, giveaway)
    assert bag_of_words(*train, *test).accuracy == 1.0


def test_what_only_the_words_show_is_hidden_from_the_length() -> None:
    train, test = sentences(200, "other"), sentences(100, "other")
    assert text_length(*train, *test).accuracy < 0.65


def test_word_order_is_not_seen() -> None:
    texts, labels = ["dog bites man", "man bites dog"] * 30, np.arange(60) % 2
    assert bag_of_words(texts, labels, texts, labels).accuracy == 0.5


def test_length_gives_itself_away() -> None:
    labels = np.arange(80) % 2
    texts = ["word " * (3 + 4 * int(label) + i % 3) for i, label in enumerate(labels)]
    assert text_length(texts[:60], labels[:60], texts[60:], labels[60:]).accuracy == 1.0


def test_majority_names_the_most_frequent_of_training() -> None:
    scores = majority(np.array(["b", "b", "a"]), np.array(["a", "a", "b"]))
    assert (scores.correct, scores.n) == (1, 3)


def test_texts_that_do_not_fit() -> None:
    labels = np.array([0, 1])
    with pytest.raises(InvalidRows, match="got 2 for 1 texts"):
        bag_of_words(["a"], labels, ["a", "b"], labels)
    with pytest.raises(InvalidRows, match="got 2 for 1 texts"):
        text_length(["a", "b"], labels, ["a"], labels)
    with pytest.raises(InvalidRows, match="all are blank"):
        bag_of_words(["", " "], labels, ["a", "b"], labels)
