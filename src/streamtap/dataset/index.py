"""The index: a Parquet table that finds each prompt's rows, with the manifest in its footer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from streamtap.dataset.described import PREFIXES, from_metadata, from_sidecar
from streamtap.dataset.manifest import Manifest
from streamtap.dataset.names import INDEX, SIDECAR
from streamtap.dataset.places import Source
from streamtap.errors import DatasetDamaged, DatasetNotFound

Ints = NDArray[np.int64]

# Most footers fit, and a server is asked once.
_TAIL_BYTES = 1 << 16
_END_BYTES = 8
_MAGIC = b"PAR1"
#: The format's own columns; a prompt's metadata may not take their names.
CORE_COLUMNS = frozenset(
    [
        *("text", "label", "num_tokens", "shard_index", "row_offset", "token_offset"),
        *("shard_index_logits", "row_offset_logits", "shard_index_hidden", "row_offset_hidden", "token_offset_hidden"),
        *("shard_index_router", "row_offset_router", "token_shard_ids", "token_shard_offsets"),
        *("perplexity_mean", "perplexity_min", "perplexity_max"),
        *("token_ids", "token_strings", "token_perplexity", "pushed_index", "tokenized_as"),
    ]
)


@dataclass(frozen=True)
class Footer:
    """What the end of an index says: ``columns`` are names and Arrow types, ``size_bytes`` the whole index's."""

    manifest: Manifest
    n_rows: int
    columns: Mapping[str, str]
    size_bytes: int


@dataclass(frozen=True)
class Places:
    """Where rows lie: shard and row in it, int64 [rows] each."""

    shards: Ints
    rows: Ints

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.shards)

    def pick(self, numbers: Ints) -> Places:
        """Some of the rows, in that order."""
        return Places(self.shards[numbers], self.rows[numbers])


def read_footer(source: Source) -> Footer:
    """The manifest and the columns, from the end of the index alone.

    Raises:
        DatasetNotFound: no index there, or one without any manifest.
        DatasetDamaged: an index or manifest that means nothing.
        Unsupported: a newer major version of the format.
    """
    tail, size_bytes = source.read_tail(INDEX, _TAIL_BYTES)
    if len(tail) < _END_BYTES or tail[-4:] != _MAGIC:
        raise DatasetDamaged(f"the index of {source.name} is not a whole Parquet file.")
    wanted = int.from_bytes(tail[-_END_BYTES:-4], "little") + _END_BYTES
    if wanted > size_bytes:
        raise DatasetDamaged(f"the index of {source.name} is not a whole Parquet file.")
    if wanted > len(tail):
        tail = source.read_range(INDEX, size_bytes - wanted, size_bytes - len(tail)) + tail
    try:
        footer = pq.read_metadata(pa.BufferReader(tail[-wanted:]))
        schema = footer.schema.to_arrow_schema()
    except (pa.ArrowException, OSError) as error:
        raise DatasetDamaged(f"the footer of the index of {source.name} is damaged.") from error
    columns = {field.name: str(field.type) for field in schema}
    return Footer(_manifest(source, _metadata(footer, schema, source.name)), footer.num_rows, columns, size_bytes)


class IndexFile:
    """An index on this machine; columns are read when they are asked for."""

    def __init__(self, path: Path, source: Source) -> None:
        self._path, self._source = path, source
        try:
            self._file = pq.ParquetFile(path)
        except (pa.ArrowException, OSError) as error:
            raise DatasetDamaged(f"the index of {source.name} is not a whole Parquet file.") from error
        self._names = set(self._file.schema_arrow.names)

    def __len__(self) -> int:
        """Number of prompts."""
        return int(self._file.metadata.num_rows)

    @cached_property
    def manifest(self) -> Manifest:
        """The dataset's manifest."""
        metadata = _metadata(self._file.metadata, self._file.schema_arrow, self._source.name)
        return _manifest(self._source, metadata)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns, in their order."""
        return tuple(self._file.schema_arrow.names)

    def has(self, column: str) -> bool:
        """Whether there is such a column."""
        return column in self._names

    def column(self, name: str) -> pa.ChunkedArray:
        """A column as Arrow holds it.

        Raises:
            DatasetDamaged: there is none, or it cannot be read.
        """
        if not self.has(name):
            raise DatasetDamaged(f"the index of {self._source.name} lacks column {name}.")
        try:
            return self._file.read(columns=[name]).column(name)
        except (pa.ArrowException, OSError) as error:
            raise DatasetDamaged(f"column {name} of the index of {self._source.name} is damaged.") from error

    def texts(self) -> list[str]:
        """The prompts, in the dataset's order."""
        texts: list[str] = self.column("text").to_pylist()
        return texts

    def labels(self) -> NDArray[Any] | None:
        """int64 or str [prompts]; an object array with None where some are null; None where all are."""
        if not self.has("label"):
            return None
        column = self.column("label")
        if column.null_count == len(column):
            return None
        if column.null_count:
            return np.array(column.to_pylist(), dtype=object)
        if pa.types.is_integer(column.type):
            return np.asarray(column.to_numpy(), np.int64)
        return np.array(column.to_pylist())

    def ints(self, *names: str) -> Ints:
        """The first of these columns that is there, int64 [prompts].

        Raises:
            DatasetDamaged: none is there, or it holds something else than ints.
        """
        name = next((name for name in names if self.has(name)), names[-1])
        column = self.column(name)
        if column.null_count or not pa.types.is_integer(column.type):
            raise DatasetDamaged(f"column {name} of the index of {self._source.name} must hold an int in each row.")
        return np.asarray(column.to_numpy(), np.int64)

    def floats(self, name: str) -> NDArray[np.float64]:
        """A column of numbers, float64 [prompts]; null is NaN."""
        return np.array(self.column(name).to_numpy(), np.float64)

    def places(self) -> Places:
        """Where each prompt's one row lies: its pooled row, or its last token's."""
        return self._places

    @cached_property
    def _places(self) -> Places:
        hidden = self.manifest.hidden
        if hidden is not None and hidden.pooling is None and not hidden.last_token_shards:
            # Without shards of their own the last tokens are found among the others.
            tokens, offsets = self.token_places()
            return tokens.pick(offsets[1:] - 1)
        return Places(
            self.ints("shard_index_hidden", "shard_index"),
            self.ints("row_offset_hidden", "row_offset"),
        )

    def logit_places(self) -> Places:
        """Where each prompt's logits lie."""
        return Places(self.ints("shard_index_logits", "shard_index"), self.ints("row_offset_logits", "row_offset"))

    def lists(self, name: str) -> tuple[NDArray[Any], Ints]:
        """A column of lists as its values, one after the other, and offsets int64 [prompts + 1]; null is empty.

        Raises:
            DatasetDamaged: there is no such column of lists.
        """
        whole = self.column(name).combine_chunks()
        array = whole if isinstance(whole, pa.Array) else pa.concat_arrays(whole.chunks)
        if not (pa.types.is_list(array.type) or pa.types.is_large_list(array.type)):
            raise DatasetDamaged(f"column {name} of the index of {self._source.name} must hold lists.")
        lengths = np.asarray(array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False), np.int64)
        offsets = np.zeros(len(array) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        return array.flatten().to_numpy(zero_copy_only=False), offsets

    def token_places(self) -> tuple[Places, Ints]:
        """Where every token's row lies, prompt after prompt, and offsets int64 [prompts + 1].

        Raises:
            DatasetDamaged: the index does not say.
        """
        shards, offsets = self.lists("token_shard_ids")
        rows, again = self.lists("token_shard_offsets")
        if not (np.array_equal(offsets, again) and shards.dtype.kind == rows.dtype.kind == "i"):
            raise DatasetDamaged(f"the token columns of the index of {self._source.name} do not fit each other.")
        return Places(np.asarray(shards, np.int64), np.asarray(rows, np.int64)), offsets


def write_index(path: Path, batches: Iterable[Mapping[str, pa.Array]], metadata: Mapping[str, str]) -> None:
    """Write an index, batch after batch of prompts, and the manifest's metadata at its end."""
    writer = None
    try:
        for columns in batches:
            table = pa.table(dict(columns))
            if writer is None:
                # Beside Arrow's own copy of a schema, metadata that comes last would not be seen by `read_schema`.
                writer = pq.ParquetWriter(path, table.schema, compression="zstd", store_schema=False)
            writer.write_table(table.cast(writer.schema))
        if writer is not None:
            writer.add_key_value_metadata(dict(metadata))
    finally:
        if writer is not None:
            writer.close()


def rewrite_index(old: Path, new: Path, metadata: Mapping[str, str], *, without: frozenset[str] = frozenset()) -> None:
    """Copy an index with other metadata and without some columns, a row group at a time."""
    file = pq.ParquetFile(old)
    kept = [name for name in file.schema_arrow.names if name not in without]
    groups = (file.read_row_group(i, columns=kept) for i in range(file.num_row_groups))
    write_index(new, ({name: table.column(name) for name in kept} for table in groups), metadata)


def _metadata(footer: Any, schema: pa.Schema, where: str) -> dict[str, str]:
    pairs = {**(schema.metadata or {}), **(footer.metadata or {})}
    try:
        # Other programs' keys are none of ours, and may be any bytes.
        return {key.decode(): value.decode() for key, value in pairs.items() if key.startswith(PREFIXES)}
    except UnicodeDecodeError as error:
        raise DatasetDamaged(f"the metadata of {where} is not text.") from error


def _manifest(source: Source, metadata: Mapping[str, str]) -> Manifest:
    found = from_metadata(metadata, source.name)
    if found is not None:
        return found
    try:
        content = source.fetch(SIDECAR).read_bytes()
    except DatasetNotFound as error:
        raise DatasetNotFound(
            f"{source.name} holds a Parquet index, but neither it nor {SIDECAR} describes activations; "
            "it is not a dataset of this format."
        ) from error
    return from_sidecar(content, source.name)
