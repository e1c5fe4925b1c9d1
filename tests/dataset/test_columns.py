"""Labels and metadata become Arrow columns of their own types, or are refused by index."""

from __future__ import annotations

import enum
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from streamtap.dataset.columns import PromptColumns, label_column, metadata_columns, pick
from streamtap.dataset.index import CORE_COLUMNS
from streamtap.errors import InvalidInput


class Side(enum.Enum):
    LEFT = 0


class Truth(enum.IntEnum):
    NO, YES = 0, 1


class Answer(enum.StrEnum):
    NO, YES = "no", "yes"


class Said(str, enum.Enum):  # noqa: UP042  (whose str() is not its value)
    NO, YES = "no", "yes"


GOOD_LABELS: dict[str, tuple[Any, pa.DataType, list[Any]]] = {
    "ints": ([1, 0], pa.int32(), [1, 0]),
    "none": ([1, None], pa.int32(), [1, None]),
    "all none": ([None, None], pa.int32(), [None, None]),
    "numpy ints": (np.array([1, 0], np.int8), pa.int32(), [1, 0]),
    "numpy bools": (np.array([True, False]), pa.int32(), [1, 0]),
    "numpy strings": (np.array(["a", "b"]), pa.string(), ["a", "b"]),
    "bools": ([True, False], pa.int32(), [1, 0]),
    "strings": (["a", None], pa.string(), ["a", None]),
    "an empty string": (["", "é"], pa.string(), ["", "é"]),
    "largest int32": ([2**31 - 1, -(2**31)], pa.int32(), [2**31 - 1, -(2**31)]),
    "over int32": ([2**31, 0], pa.int64(), [2**31, 0]),
    "under int32": ([-(2**31) - 1, None], pa.int64(), [-(2**31) - 1, None]),
    "largest int64": ([2**63 - 1, 1], pa.int64(), [2**63 - 1, 1]),
    "series": (pd.Series([1, 0], index=[7, 3]), pa.int32(), [1, 0]),
    "series with NaN": (pd.Series([1.0, np.nan]), pa.int32(), [1, None]),
    "series with NA": (pd.Series([1, pd.NA], dtype="Int64"), pa.int32(), [1, None]),
    "series of strings": (pd.Series(["a", None]), pa.string(), ["a", None]),
    "series of bools with NA": (pd.Series([True, pd.NA], dtype="boolean"), pa.int32(), [1, None]),
    "NaT": ([pd.NaT, 1], pa.int32(), [None, 1]),
    "enum of ints": ([Truth.YES, Truth.NO], pa.int32(), [1, 0]),
    "enum of strings": ([Answer.YES, Answer.NO], pa.string(), ["yes", "no"]),
    "older enum of strings": ([Said.YES, "no"], pa.string(), ["yes", "no"]),
}


@pytest.mark.parametrize("name", list(GOOD_LABELS))
def test_labels(name: str) -> None:
    labels, kind, values = GOOD_LABELS[name]
    column = label_column(labels, len(labels))

    assert column.type == kind
    assert column.to_pylist() == values


def test_no_labels_are_a_column_of_nulls() -> None:
    column = label_column(None, 3)

    assert column.type == pa.int32()
    assert column.null_count == 3


BAD_LABELS: dict[str, tuple[Any, str]] = {
    "a float": ([1, 0.5], "label 1 is a float"),
    "an infinity": ([1, float("inf")], "label 1 is a float"),
    "a numpy float": (np.array([0.0, 0.25], np.float32), "label 1 is a float"),
    "a list": ([0, [1]], "label 1 is a list"),
    "rows": (np.zeros((2, 2), np.int64), "label 0 is a ndarray"),
    "bytes": ([b"a", b"b"], "label 0 is a bytes"),
    "an enum": ([Side.LEFT, 1], "label 0 is a Side"),
    "a time": ([1, np.datetime64("2026-01-01", "ns")], "label 1 is a datetime64"),
    "a span": ([1, np.timedelta64(1, "ns")], "label 1 is a timedelta64"),
    "mixed": ([0, "a"], "label 1 is a string among ints"),
    "mixed, string first": (["a", 0], "label 0 is a string among ints"),
    "too large": ([2**63, 0], "fit into 64 bits"),
    "a lone surrogate": (["a", "\ud800"], "UTF-8"),
    "one too many": ([1, 2, 3], "got 3 for 2 prompts"),
    "one too few": ([1], "got 1 for 2 prompts"),
}


@pytest.mark.parametrize("name", list(BAD_LABELS))
def test_labels_are_refused_by_index(name: str) -> None:
    labels, message = BAD_LABELS[name]
    with pytest.raises(InvalidInput, match=message):
        label_column(labels, 2)


GOOD_METADATA: dict[str, tuple[list[Any], pa.DataType, list[Any]]] = {
    "ints": ([1, 2**40], pa.int64(), [1, 2**40]),
    "a float after an int": ([1, 2.5], pa.float64(), [1.0, 2.5]),
    "a numpy float after a numpy int": ([np.int32(1), np.float32(2.5)], pa.float64(), [1.0, 2.5]),
    "a float after an int in a list": ([[1], [2.5]], pa.list_(pa.float64()), [[1.0], [2.5]]),
    "a float after an int in a dict": (
        [{"a": 1}, {"a": 2.5}],
        pa.struct([("a", pa.float64())]),
        [{"a": 1.0}, {"a": 2.5}],
    ),
    "bools": ([True, None], pa.bool_(), [True, None]),
    "numpy bools": ([np.True_, np.False_], pa.bool_(), [True, False]),
    "strings": (["a", None], pa.string(), ["a", None]),
    "numpy strings": ([np.str_("a"), "b"], pa.string(), ["a", "b"]),
    "NaN": ([1.5, float("nan")], pa.float64(), [1.5, None]),
    "NaN among strings": (["a", float("nan")], pa.string(), ["a", None]),
    "NA": ([pd.NA, 3], pa.int64(), [None, 3]),
    "days": ([date(2026, 1, 2), None], pa.date32(), [date(2026, 1, 2), None]),
    "times": ([datetime(2026, 1, 2), None], pa.timestamp("us"), [datetime(2026, 1, 2), None]),
    "times of a zone": (
        [datetime(2026, 1, 2, tzinfo=UTC)] * 2,
        pa.timestamp("us", "UTC"),
        [datetime(2026, 1, 2, tzinfo=UTC)] * 2,
    ),
    "numpy times": ([np.datetime64("2026-01-02", "us")] * 2, pa.timestamp("us"), [datetime(2026, 1, 2)] * 2),
    "pandas times": ([pd.Timestamp("2026-01-02"), pd.NaT], pa.timestamp("us"), [datetime(2026, 1, 2), None]),
    "lists": ([[1, 2], []], pa.list_(pa.int64()), [[1, 2], []]),
    "tuples": ([("a",), None], pa.list_(pa.string()), [["a"], None]),
    "arrays": ([np.array([1, 2]), None], pa.list_(pa.int64()), [[1, 2], None]),
    "dicts": (
        [{"a": 1}, {"b": "x"}],
        pa.struct([("a", pa.int64()), ("b", pa.string())]),
        [{"a": 1, "b": None}, {"a": None, "b": "x"}],
    ),
    "lists of dicts": ([[{"a": 1}], []], pa.list_(pa.struct([("a", pa.int64())])), [[{"a": 1}], []]),
    "bytes": ([b"a", None], pa.binary(), [b"a", None]),
    "decimals": ([Decimal("1.5"), Decimal("20.0")], pa.decimal128(3, 1), [Decimal("1.5"), Decimal("20.0")]),
    "nothing": ([None, None], pa.string(), [None, None]),
    "empty lists": ([[], []], pa.list_(pa.string()), [[], []]),
    "nothing in dicts": ([{"a": None}, {"a": None}], pa.struct([("a", pa.string())]), [{"a": None}] * 2),
    "empty lists in dicts": ([{"a": []}, None], pa.struct([("a", pa.list_(pa.string()))]), [{"a": []}, None]),
}


@pytest.mark.parametrize("name", list(GOOD_METADATA))
def test_metadata(name: str) -> None:
    values, kind, expected = GOOD_METADATA[name]
    column = metadata_columns([{"key": value} for value in values], len(values))["key"]

    assert column.type == kind
    assert column.to_pylist() == expected


def test_numpy_times_of_nanoseconds_stay_times() -> None:
    column = metadata_columns([{"key": np.datetime64("2026-01-02", "ns")}], 1)["key"]

    assert column.type == pa.timestamp("ns")


def test_columns_are_sorted_whatever_the_order_of_keys() -> None:
    rows = [{"b": 1, "a": "x", "c": None}, {"c": None, "a": "y", "b": 2}]

    columns = metadata_columns(rows, 2)
    assert list(columns) == ["a", "b", "c"]
    assert columns["b"].to_pylist() == [1, 2]
    assert metadata_columns(None, 2) == {}
    assert metadata_columns([{}, {}], 2) == {}


BAD_METADATA: dict[str, tuple[list[Any], str]] = {
    "one too few": ([{"a": 1}], "got 1 for 2 prompts"),
    "a missing key": ([{"a": 1, "b": 2}, {"a": 1}], "prompt 1 differs in 'b'"),
    "another key": ([{"a": 1}, {"b": 1}], "prompt 1 differs in 'a', 'b'"),
    "a key of ints": ([{1: 1}, {1: 1}], "non-empty string; got 1"),
    "an empty key": ([{"": 1}, {"": 1}], "non-empty string; got ''"),
    "no dict": ([{"a": 1}, "a"], "that of prompt 1 is a str"),
    "nothing": ([None, None], "that of prompt 0 is a NoneType"),
    "mixed": ([{"a": 1}, {"a": "x"}], r"'a' have no common column type: int \(prompt 0\), str \(prompt 1\)"),
    "bool among ints": ([{"a": 1}, {"a": True}], r"int \(prompt 0\), bool \(prompt 1\)"),
    "a list among ints": ([{"a": 1}, {"a": [1]}], r"int \(prompt 0\), list \(prompt 1\)"),
    "an object": ([{"a": object()}, {"a": None}], r"object \(prompt 0\)"),
    "an int that is too large": ([{"a": 2**64}, {"a": None}], r"'a' have no common column type: int \(prompt 0\)"),
    "a lone surrogate": ([{"a": "\ud800"}, {"a": None}], "'a' have no common column type"),
    "a span": ([{"a": timedelta(1)}, {"a": None}], r"'a' has values that become duration\[us\]"),
    "an empty dict": ([{"a": {}}, {"a": None}], "'a' has values that become struct<>"),
    "a uuid": ([{"a": UUID(int=3)}, {"a": None}], "'a'"),
}


@pytest.mark.parametrize("name", list(BAD_METADATA))
def test_metadata_is_refused_by_key_and_index(name: str) -> None:
    rows, message = BAD_METADATA[name]
    with pytest.raises(InvalidInput, match=message):
        metadata_columns(rows, 2)


@pytest.mark.parametrize("key", sorted(CORE_COLUMNS))
def test_the_formats_own_columns_cannot_be_overwritten(key: str) -> None:
    with pytest.raises(InvalidInput, match=f"metadata key '{key}' is a column of the format itself"):
        metadata_columns([{key: 1}], 1)


def prompt_columns(**changes: Any) -> PromptColumns:
    about: dict[str, Any] = {
        "texts": ["a", "b", "c"],
        "labels": label_column([1, 0, None], 3),
        "metadata": metadata_columns([{"x": place} for place in range(3)], 3),
        "num_tokens": np.array([3, 4, 5]),
        "pushed_index": np.array([2, 0, 1]),
    }
    return PromptColumns(**(about | changes))


def test_the_fingerprint_knows_texts_labels_metadata_and_their_order() -> None:
    columns = [
        prompt_columns(),
        prompt_columns(texts=["a", "c", "b"]),
        prompt_columns(labels=label_column([1, 0, 0], 3)),
        prompt_columns(labels=label_column(["1", "0", None], 3)),
        prompt_columns(metadata=metadata_columns([{"y": place} for place in range(3)], 3)),
        prompt_columns(metadata=metadata_columns([{"x": float(place)} for place in range(3)], 3)),
        prompt_columns(metadata={}),
    ]

    assert prompt_columns().fingerprint() == columns[0].fingerprint()
    assert len({each.fingerprint() for each in columns}) == len(columns)


def test_a_batch_is_a_stretch_of_every_column() -> None:
    batch = prompt_columns().batch(1, 3)

    assert {name: column.to_pylist() for name, column in batch.items()} == {
        "text": ["b", "c"],
        "label": [0, None],
        "num_tokens": [4, 5],
        "pushed_index": [0, 1],
        "x": [1, 2],
    }


def test_values_are_picked_in_an_order() -> None:
    column = label_column([5, None, 7], 3)

    assert pick(column, np.array([2, 0, 1, 2])).to_pylist() == [7, 5, None, 7]
