"""What the text alone gives away: a probe is worth what it adds to these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from streamtap.errors import InvalidRows
from streamtap.probes.scores import Scores, score_classifier, score_predictions

#: Words of any length, and each mark by itself: a question mark can be the give-away.
_TOKEN = r"(?u)\w+|[^\w\s]"


def bag_of_words(
    train_texts: Sequence[str], train_labels: NDArray[Any], test_texts: Sequence[str], test_labels: NDArray[Any]
) -> Scores:
    """Test scores of a logistic regression on counts of words, blind to their order.

    Raises:
        InvalidRows: lengths that differ, or training texts without a single word.
    """
    _check_lengths(train_texts, train_labels)
    _check_lengths(test_texts, test_labels)
    if not any(text.strip() for text in train_texts):
        raise InvalidRows("the bag-of-words baseline needs training texts with words in them; all are blank.")
    model = make_pipeline(CountVectorizer(token_pattern=_TOKEN), LogisticRegression(max_iter=2000))
    return score_classifier(model.fit(list(train_texts), train_labels), np.asarray(test_texts, object), test_labels)


def text_length(
    train_texts: Sequence[str], train_labels: NDArray[Any], test_texts: Sequence[str], test_labels: NDArray[Any]
) -> Scores:
    """Test scores of a logistic regression on two numbers, the characters and the words of a text.

    Raises:
        InvalidRows: lengths that differ.
    """
    _check_lengths(train_texts, train_labels)
    _check_lengths(test_texts, test_labels)
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))
    return score_classifier(model.fit(_lengths(train_texts), train_labels), _lengths(test_texts), test_labels)


def majority(train_labels: NDArray[Any], test_labels: NDArray[Any]) -> Scores:
    """Test scores of always naming the label that is most frequent in training (of equals the first in order)."""
    classes, counts = np.unique(train_labels, return_counts=True)
    return score_predictions(test_labels, np.full(len(test_labels), classes[np.argmax(counts)]))


def _lengths(texts: Sequence[str]) -> NDArray[np.float64]:
    return np.array([[len(text), len(text.split())] for text in texts], dtype=np.float64)


def _check_lengths(texts: Sequence[str], labels: NDArray[Any]) -> None:
    if len(texts) != len(labels):
        raise InvalidRows(f"a text baseline needs one label a text; got {len(labels)} for {len(texts)} texts.")
