"""Labels and metadata beside the prompts of a JSONL, CSV, TSV or Parquet file."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from streamtap.errors import InvalidInput
from streamtap.workbench.prompt_files import csv_cells, format_of, parquet_columns

# Digits alone: 007 is the name of something, and 1_000, inf and nan are words.
_INT = re.compile(r"-?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_INT64 = range(-(1 << 63), 1 << 63)


def read_beside(
    path: str | Path, columns: Sequence[str], *, file_format: str | None = None, limit: int | None = None
) -> dict[str, list[Any]]:
    """Values of other columns of a file of prompts, one a prompt, in the order of ``read_prompts``.

    Numbers of a CSV or TSV file are read as numbers where every cell of the column is one; an empty cell is None.

    Raises:
        InvalidInput: a column that is not there, or a file of plain text, which has none.
        OSError: the file cannot be read.
    """
    file = Path(path)
    kind = file_format or format_of(file)
    if kind == "text":
        raise InvalidInput(f"{file.name} is plain text, which has no columns; give JSONL, CSV or Parquet.")
    if kind == "jsonl":
        return _from_jsonl(file, columns, limit)
    table = parquet_columns(file, limit) if kind == "parquet" else csv_cells(file, kind, limit)
    if absent := [column for column in columns if column not in table]:
        raise InvalidInput(f"{file.name} has no column {absent[0]!r}; it has {', '.join(map(repr, table)) or 'none'}.")
    found = {column: table[column] for column in columns}
    return found if kind == "parquet" else {column: _numbers(cells) for column, cells in found.items()}


def _from_jsonl(file: Path, columns: Sequence[str], limit: int | None) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {column: [] for column in columns}
    # As for prompts, only a line feed ends a line.
    with file.open(encoding="utf-8-sig", newline="\n") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip() or (limit is not None and number > limit):
                break
            value = _value(line, file, number)
            for column in columns:
                if not isinstance(value, dict) or column not in value:
                    has = ", ".join(map(repr, value)) if isinstance(value, dict) else "no keys"
                    raise InvalidInput(f"{file.name}, line {number} has no {column!r}; it has {has or 'none'}.")
                found[column].append(value[column])
    return found


def _value(line: str, file: Path, number: int) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise InvalidInput(f"{file.name}, line {number} is not JSON; each line must be one JSON value.") from error


def _numbers(cells: Sequence[str]) -> list[Any]:
    """Cells as ints or floats where all that are not empty are such, else as they stand."""
    filled = [cell for cell in cells if cell]
    if all(_INT.fullmatch(cell) and int(cell) in _INT64 for cell in filled):
        return [int(cell) if cell else None for cell in cells]
    if all(_FLOAT.fullmatch(cell) for cell in filled):
        return [float(cell) if cell else None for cell in cells]
    return [cell or None for cell in cells]
