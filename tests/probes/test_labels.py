"""Labels keep their type, and nothing that is not a label passes for one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from streamtap.errors import InvalidRows
from streamtap.probes.labels import read_labels


@pytest.mark.parametrize(
    ("labels", "kind"),
    [
        ([0, 1, 0], "i"),
        ([True, False, True], "b"),
        (["yes", "no", "yes"], "U"),
        ([0.0, 1.0, 0.0], "f"),
        (np.array(["a", "b", "a"], dtype=object), "U"),
        (np.array([1, 2, 1], dtype=np.uint8), "u"),
        ((np.int64(3), np.int64(4), np.int64(3)), "i"),
    ],
)
def test_labels_keep_their_type(labels: Any, kind: str) -> None:
    read = read_labels(labels, 3)
    assert read.dtype.kind == kind
    assert read.tolist() == list(labels)


def test_torch_labels() -> None:
    assert read_labels(torch.tensor([True, False]), 2).tolist() == [True, False]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0.0, 0.5, 1.0], "label 1 is 0.5, a fraction"),
        ([0.0, float("nan"), 1.0], "label 1 is nan"),
        ([0, 1, None], "label 2 is None"),
        (["a", None, "b"], "label 1 is None"),
        ([0, "1", 0], "mix int, str"),
        ([True, 1, 0], "mix bool, int"),
        ([1, 1, 1], "at least 2 classes to learn from; all 3 labels are 1"),
        (["no"] * 3, "all 3 labels are no"),
        ([0, 1], "for each of the 3 rows; got 2"),
        ([[0], [1], [0]], r"got shape \(3, 1\)"),
        ("abc", "got str"),
        (np.array([b"a", b"b", b"a"]), r"dtype \|S1"),
        (7, "got int"),
    ],
)
def test_what_is_no_label_is_refused(labels: Any, message: str) -> None:
    with pytest.raises(InvalidRows, match=message):
        read_labels(labels, 3)


def test_scoring_takes_one_class() -> None:
    assert read_labels([1, 1], 2, min_classes=1).tolist() == [1, 1]
