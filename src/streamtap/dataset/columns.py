"""Labels and metadata of prompts as Arrow columns, checked whole before any work."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from streamtap.dataset.index import CORE_COLUMNS
from streamtap.errors import InvalidInput

_INT32 = np.iinfo(np.int32)


def label_column(labels: Sequence[Any] | None, n_prompts: int) -> pa.Array:
    """The label column [prompts]: int32, int64 where a label needs it, or string; null where there is none.

    Booleans count as 0 and 1, and NaN, as pandas writes a missing label, as none.

    Raises:
        InvalidInput: labels of another number or kind; the first of them is named by its index.
    """
    if labels is None:
        return pa.nulls(n_prompts, pa.int32())
    if len(labels) != n_prompts:
        raise InvalidInput(f"labels must be one a prompt: got {len(labels)} for {n_prompts} prompts.")
    values = [_label(label, place) for place, label in enumerate(labels)]
    kinds = {type(value) for value in values if value is not None}
    if kinds == {int, str}:
        place = next(i for i, value in enumerate(values) if isinstance(value, str))
        raise InvalidInput(f"labels must be all ints or all strings; label {place} is a string among ints.")
    fits = all(_INT32.min <= value <= _INT32.max for value in values if isinstance(value, int))
    try:
        return pa.array(values, pa.string() if kinds == {str} else pa.int32() if fits else pa.int64())
    except OverflowError as error:
        raise InvalidInput("an int label must fit into 64 bits; use strings for longer ones.") from error
    except UnicodeEncodeError as error:
        raise InvalidInput("a string label must be text that UTF-8 can write, without lone surrogates.") from error


def metadata_columns(metadata: Sequence[Mapping[str, Any]] | None, n_prompts: int) -> dict[str, pa.Array]:
    """One column a key, sorted by name, each of the Arrow type that its values have.

    Raises:
        InvalidInput: another number of dicts than prompts, dicts of different keys, a key that the format uses
            itself, or values of one key that have no common type; the key and the first index are named.
    """
    if metadata is None:
        return {}
    rows = list(metadata)
    if len(rows) != n_prompts:
        raise InvalidInput(f"metadata must be one dict a prompt: got {len(rows)} for {n_prompts} prompts.")
    keys: set[Any] = set()
    for place, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise InvalidInput(f"metadata must be one dict a prompt; that of prompt {place} is a {type(row).__name__}.")
        keys = keys if place else set(row)
        if set(row) != keys:
            odd = ", ".join(repr(key) for key in sorted(map(str, keys ^ set(row))))
            raise InvalidInput(
                f"every metadata dict must have the same keys; the one of prompt {place} differs in {odd}."
            )
    for key in keys:
        if not isinstance(key, str) or not key:
            raise InvalidInput(f"a metadata key must be a non-empty string; got {key!r}.")
        if key in CORE_COLUMNS:
            raise InvalidInput(f"metadata key {key!r} is a column of the format itself; rename it.")
    return {key: _column(key, [row[key] for row in rows]) for key in sorted(keys)}


def _label(label: Any, place: int) -> int | str | None:
    value = _plain(label)
    # pandas' own missing value is not equal to itself in any way that `is` would see.
    if value is None or type(value).__name__ in ("NAType", "NaTType") or (isinstance(value, float) and value != value):
        return None
    if isinstance(value, bool | int | str):
        # Of an enum's member the plain value.
        return str.__str__(value) if isinstance(value, str) else int(value)
    if isinstance(value, float) and value.is_integer():
        # A column of ints with one missing is a column of floats in pandas.
        return int(value)
    kind = type(value).__name__
    raise InvalidInput(f"labels must be ints, strings or None; label {place} is a {kind}. Cast them, or use metadata.")


def _column(key: str, values: list[Any]) -> pa.Array:
    plain = [_plain(value) for value in values]
    try:
        column = pa.array(plain, from_pandas=True)
    except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
        raise InvalidInput(
            f"the values of metadata key {key!r} have no common column type: {_kinds(plain)}. "
            "Give every prompt the same kind of value, or None."
        ) from error
    kind = _readable(column.type, key)
    return column if kind == column.type else column.cast(kind)


def _plain(value: Any) -> Any:
    """A numpy scalar as Python's own; times stay, for those of nanoseconds would become ints."""
    return value.item() if isinstance(value, np.generic) and value.dtype.kind not in "mM" else value


def _readable(kind: pa.DataType, key: str) -> pa.DataType:
    """The type itself, with strings for nulls alone, which not every reader knows.

    Raises:
        InvalidInput: a type that does not come back from a Parquet file.
    """
    if pa.types.is_null(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_readable(kind.value_type, key))
    if pa.types.is_struct(kind) and kind.num_fields:
        return pa.struct([(field.name, _readable(field.type, key)) for field in kind])
    if pa.types.is_nested(kind) or pa.types.is_duration(kind) or isinstance(kind, pa.BaseExtensionType):
        raise InvalidInput(
            f"metadata key {key!r} has values that become {kind}, which an index cannot keep; "
            "give numbers, strings, times, lists, or dicts that are not empty."
        )
    return kind


def _kinds(values: Sequence[Any]) -> str:
    first: dict[str, int] = {}
    for place, value in enumerate(values):
        first.setdefault(type(value).__name__, place)
    return ", ".join(f"{kind} (prompt {place})" for kind, place in first.items() if kind != "NoneType")


@dataclass(frozen=True)
class PromptColumns:
    """What the index says of prompts, in the dataset's order, beside where their rows lie.

    ``labels`` and ``metadata`` are as the functions above made them; ``num_tokens`` and ``pushed_index`` (the place in
    the list that was pushed) are int64 [prompts]; ``tokenized_as`` (how a text became tokens, as whoever pulls it will
    read it) too; ``perplexity`` is float64 [prompts, 3], NaN where not known. The two
    functions give token ids and token perplexities of prompts [start, stop), one array or None a prompt.
    """

    texts: Sequence[str]
    labels: pa.Array
    metadata: Mapping[str, pa.Array]
    num_tokens: NDArray[np.int64]
    pushed_index: NDArray[np.int64]
    perplexity: NDArray[np.float64] | None = None
    tokenized_as: NDArray[np.int64] | None = None
    token_ids: Callable[[int, int], Sequence[NDArray[Any]]] | None = None
    token_perplexity: Callable[[int, int], Sequence[NDArray[Any] | None]] | None = None

    def batch(self, start: int, stop: int) -> dict[str, pa.Array]:
        """The columns of prompts [start, stop)."""
        here = slice(start, stop)
        columns = {
            "text": pa.array(self.texts[here], pa.string()),
            "label": self.labels[here],
            "num_tokens": pa.array(self.num_tokens[here], pa.int32()),
            "pushed_index": pa.array(self.pushed_index[here], pa.int64()),
            **{key: column[here] for key, column in self.metadata.items()},
        }
        if self.perplexity is not None:
            for number, name in enumerate(("mean", "min", "max")):
                values = self.perplexity[here, number]
                columns[f"perplexity_{name}"] = pa.array(values, pa.float64(), from_pandas=True)
        if self.tokenized_as is not None:
            columns["tokenized_as"] = pa.array(self.tokenized_as[here], pa.int8())
        if self.token_ids is not None:
            columns["token_ids"] = pa.array(self.token_ids(start, stop), pa.list_(pa.int64()))
        if self.token_perplexity is not None:
            columns["token_perplexity"] = pa.array(self.token_perplexity(start, stop), pa.list_(pa.float64()))
        return columns

    def fingerprint(self) -> str:
        """Hash of texts, labels and metadata, in their order."""
        state = hashlib.sha256()
        for start in range(0, len(self.texts), 4096):
            here = slice(start, start + 4096)
            rows = [self.texts[here], self.labels[here].to_pylist()]
            rows += [[key, str(column.type), column[here].to_pylist()] for key, column in self.metadata.items()]
            state.update(json.dumps(rows, default=str, ensure_ascii=True).encode())
        return state.hexdigest()


def pick(column: pa.Array, order: NDArray[np.int64]) -> pa.Array:
    """The values of a column at some places, in that order."""
    return column.take(pa.array(order))
