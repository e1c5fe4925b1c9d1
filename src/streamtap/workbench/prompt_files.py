"""Prompts out of text, JSONL, CSV and Parquet files.

Nothing is skipped: what is not a prompt is refused, by its line or row.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from streamtap.errors import InvalidInput, InvalidPrompt
from streamtap.spec import Prompt
from streamtap.workbench.prompt_columns import choose_column

FORMATS = ("text", "jsonl", "csv", "tsv", "parquet")
_SUFFIXES = {
    "": "text",
    ".txt": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}
_DELIMITERS = {"csv": ",", "tsv": "\t"}
# The csv module refuses cells above 128 KB unless told otherwise; long prompts have more.
_CELL_BYTES = 2**31 - 1
_BATCH_ROWS = 1024


def read_prompts(
    source: str | Path | BinaryIO,
    *,
    file_format: str | None = None,
    column: str | None = None,
    limit: int | None = None,
) -> list[Prompt]:
    """Read prompts from a file, or from an open binary stream.

    Text holds one prompt a line, in UTF-8. A line of JSONL is a text, a list of messages, a list of
    token ids, or an object that holds one of these in ``column``. CSV has a header. A Parquet
    column holds text, messages, or token ids.

    Args:
        source: A path, or a stream that gives bytes.
        file_format: One of ``FORMATS``; by default what the file's name says, and text for a stream.
        column: Where the prompts are; by default ``prompt`` or ``text``, or the only column that
            can hold them.
        limit: Read only so many prompts, from the start.

    Raises:
        InvalidInput: the format or column is not clear or not there, or something is not a prompt;
            the message names its line or row.
        OSError: the file cannot be read.
    """
    if isinstance(source, str | Path):
        path = Path(source)
        with path.open("rb") as stream:
            return _read(stream, path.name, file_format or format_of(path), column, limit)
    return _read(source, "standard input", file_format or "text", column, limit)


def write_columns(path: str | Path, columns: Mapping[str, Any]) -> None:
    """Write a Parquet file with one row a prompt; each of ``columns`` has one value a prompt."""
    from pyarrow import parquet, table

    parquet.write_table(table(dict(columns)), path)


def csv_cells(path: Path, file_format: str, limit: int | None) -> dict[str, list[str]]:
    """The cells of a CSV or TSV file, by column.

    Raises:
        InvalidInput: it is not a well-formed table.
    """
    with path.open("rb") as stream:
        cells = _csv_rows(stream, path.name, _DELIMITERS[file_format], limit)[1]
    if twice := sorted({name for name in cells[0] if cells[0].count(name) > 1}):
        raise InvalidInput(f"{path.name} has more than one column {twice[0]!r}; rename one.")
    return {name: [row[i] for row in cells[1:]] for i, name in enumerate(cells[0])}


def parquet_columns(path: Path, limit: int | None) -> dict[str, list[Any]]:
    """The values of a Parquet file, by column.

    Raises:
        InvalidInput: it is not a Parquet file.
    """
    from pyarrow import ArrowInvalid, parquet

    try:
        table = parquet.read_table(path)
    except ArrowInvalid as error:
        raise InvalidInput(f"{path.name} is not a Parquet file.") from error
    columns: dict[str, list[Any]] = table.slice(0, limit).to_pydict()
    return columns


def parquet_length(path: Path) -> int:
    """Rows of a Parquet file; only its end is read.

    Raises:
        InvalidInput: it is not a Parquet file.
    """
    from pyarrow import ArrowInvalid, parquet

    try:
        return int(parquet.read_metadata(path).num_rows)
    except ArrowInvalid as error:
        raise InvalidInput(f"{path.name} is not a Parquet file.") from error


def row_values(
    stream: BinaryIO, name: str, file_format: str, *, column: str | None, limit: int | None, blank_lines: bool = False
) -> Iterator[tuple[str, Any]]:
    """Place, for errors, and value of each row, in order; a value need not be a prompt.

    All but CSV and TSV are read as they are asked for. ``blank_lines`` lets text have some.

    Raises:
        InvalidInput: as ``read_prompts``.
    """
    if file_format not in FORMATS:
        raise InvalidInput(f"the format must be one of {', '.join(FORMATS)}; got {file_format!r}.")
    if limit is not None and limit < 1:
        raise InvalidInput(f"limit must be at least 1; got {limit}.")
    if file_format == "text" and column is not None:
        raise InvalidInput(f"{name} is read as text, which has no column {column!r}; leave the column out.")
    if file_format == "text":
        lines = _lines(stream, name)
        values: Iterable[tuple[str, Any]] = _placed(lines, name) if blank_lines else _filled(lines, name)
    elif file_format == "jsonl":
        values = _from_jsonl(stream, name, column)
    elif file_format == "parquet":
        values = _from_parquet(stream, name, column)
    else:
        values = _from_csv(stream, name, column, _DELIMITERS[file_format], limit)
    return islice(values, limit)


def _read(stream: BinaryIO, name: str, file_format: str, column: str | None, limit: int | None) -> list[Prompt]:
    values = row_values(stream, name, file_format, column=column, limit=limit)
    prompts = [as_prompt(value, place, i) for i, (place, value) in enumerate(values)]
    if not prompts:
        raise InvalidInput(f"{name} holds no prompt.")
    return prompts


def format_of(path: Path) -> str:
    """What the file's name says that it is, one of ``FORMATS``.

    Raises:
        InvalidInput: the name does not say.
    """
    found = _SUFFIXES.get(path.suffix.lower())
    if found is None:
        raise InvalidInput(
            f"{path.name}: the ending {path.suffix!r} does not say what the file is; "
            f"name the format, one of {', '.join(FORMATS)}."
        )
    return found


def as_prompt(value: Any, place: str, index: int) -> Prompt:
    """A row's value as a prompt.

    Raises:
        InvalidInput: it is none; ``place`` is named.
    """
    if not isinstance(value, str | list):
        kind = "nothing" if value is None else f"a {type(value).__name__}"
        raise InvalidInput(f"{place} holds {kind}; expected text, a list of messages, or a list of token ids.")
    if isinstance(value, str) and not value.strip():
        raise InvalidInput(f"{place} is blank; expected a prompt. Remove it, or fill it.")
    try:
        return Prompt.of(value, index)
    except InvalidPrompt as error:
        raise InvalidInput(f"{place}: {error}") from error


def _lines(stream: BinaryIO, name: str) -> Iterator[tuple[int, str]]:
    """Number, from 1, and text of each line; only a line feed ends one."""
    for number, line in enumerate(stream, start=1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise InvalidInput(f"{name}, line {number} is not UTF-8; convert the file.") from error
        yield number, text.removesuffix("\n").removesuffix("\r")


def _placed(lines: Iterable[tuple[int, str]], name: str) -> Iterator[tuple[str, str]]:
    return ((f"{name}, line {number}", text) for number, text in lines)


def _filled(lines: Iterable[tuple[int, str]], name: str) -> Iterator[tuple[str, str]]:
    """Place and text of each line; a blank one is refused unless it is the last."""
    blank: int | None = None
    for number, text in lines:
        if blank is not None:
            raise InvalidInput(f"{name}, line {blank} is blank; expected a prompt. Remove it, or fill it.")
        if text.strip():
            yield f"{name}, line {number}", text
        else:
            blank = number


def _from_jsonl(stream: BinaryIO, name: str, column: str | None) -> Iterator[tuple[str, Any]]:
    chosen = column
    for place, text in _filled(_lines(stream, name), name):
        try:
            value = json.loads(text)
        except ValueError as error:
            raise InvalidInput(f"{place} is not JSON; each line must be one JSON value.") from error
        if isinstance(value, dict):
            chosen = chosen or choose_column({key: [each] for key, each in value.items()}, name)
            yield f"{place}, {chosen!r}", _member(value, chosen, place)
        elif column is not None:
            raise InvalidInput(f"{place} is not an object, so it has no {column!r}; every line must be one.")
        else:
            yield place, value


def _member(value: Mapping[str, Any], column: str, place: str) -> Any:
    if column not in value:
        raise InvalidInput(f"{place} has no {column!r}; it has {', '.join(map(repr, value)) or 'nothing'}.")
    return value[column]


def _from_csv(
    stream: BinaryIO, name: str, column: str | None, delimiter: str, limit: int | None
) -> Iterator[tuple[str, str]]:
    lines, cells = _csv_rows(stream, name, delimiter, limit)
    header, rows = cells[0], cells[1:]
    if column is None:
        column = choose_column({key: [row[i] for row in rows] for i, key in enumerate(header)}, name)
    if header.count(column) != 1:
        how = "no column" if column not in header else "more than one column"
        raise InvalidInput(f"{name} has {how} {column!r}; its columns are {', '.join(map(repr, header))}.")
    number = header.index(column)
    for line, row in zip(lines[1:], rows, strict=True):
        yield f"{name}, line {line}, {column!r}", row[number]


def _csv_rows(stream: BinaryIO, name: str, delimiter: str, limit: int | None) -> tuple[list[int], list[list[str]]]:
    """Line, from 1, where each row ends, and its cells; the header first."""
    lines, rows = list[int](), list[list[str]]()
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    try:
        with _wide_cells():
            for row in islice(reader, None if limit is None else limit + 1):
                lines.append(reader.line_num)
                rows.append(row)
    except csv.Error as error:
        raise InvalidInput(f"{name}, line {reader.line_num} is not a well-formed table: {error}.") from error
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{name}, after line {reader.line_num} is not UTF-8; convert the file.") from error
    finally:
        text.detach()
    if rows and not rows[-1] and (limit is None or len(rows) <= limit):
        del lines[-1], rows[-1]  # as in text: the last line may be blank
    if not rows:
        raise InvalidInput(f"{name} is empty; expected a header and a row for each prompt.")
    for line, row in zip(lines, rows, strict=True):
        if len(row) != len(rows[0]):
            raise InvalidInput(f"{name}, line {line} has {len(row)} cells, and the header has {len(rows[0])}.")
    return lines, rows


@contextmanager
def _wide_cells() -> Iterator[None]:
    before = csv.field_size_limit(_CELL_BYTES)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _from_parquet(stream: BinaryIO, name: str, column: str | None) -> Iterator[tuple[str, Any]]:
    from pyarrow import ArrowInvalid, parquet

    try:
        file = parquet.ParquetFile(stream if stream.seekable() else io.BytesIO(stream.read()))
    except ArrowInvalid as error:
        raise InvalidInput(f"{name} is not a Parquet file.") from error
    names: Sequence[str] = file.schema_arrow.names
    if column is None:
        first = next(file.iter_batches(batch_size=_BATCH_ROWS), None)
        column = choose_column({} if first is None else first.to_pydict(), name)
    elif column not in names:
        raise InvalidInput(f"{name} has no column {column!r}; its columns are {', '.join(map(repr, names))}.")
    row = 0
    for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=[column]):
        for value in batch.column(0).to_pylist():
            yield f"{name}, row {row}, {column!r}", value
            row += 1
