"""How figures and tables are written for a person."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Sequence

import click

_UNITS = ("kB", "MB", "GB", "TB")


def size(count_bytes: float) -> str:
    """Bytes with three or four digits: ``812 B``, ``13.4 MB``; kB are 1000 bytes."""
    if count_bytes < 1000:
        return f"{count_bytes:.0f} B"
    for unit in _UNITS:
        count_bytes /= 1000
        if count_bytes < 999.95 or unit == _UNITS[-1]:
            break
    return f"{count_bytes:.1f} {unit}"


def counted(count: int, noun: str) -> str:
    """``1 prompt``, ``2 prompts``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def number_ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers in short: ``0-29``, ``4,8,20-22``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def as_positions(text: str) -> str | list[int]:
    """``0,3,-1`` as numbers; any other spec as it is."""
    pieces = [piece.strip() for piece in text.split(",")]
    return [int(piece) for piece in pieces] if all(piece.lstrip("-").isdecimal() for piece in pieces) else text


def columns(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> list[str]:
    """Rows of cells as lines with aligned columns; those numbered in ``right`` end at one place."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def fitting(rows: Sequence[Sequence[str]], shrink: int) -> list[list[str]]:
    """The rows, with column ``shrink`` cut so that a line fits the terminal; whole where there is none."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    spare = shutil.get_terminal_size().columns - sum(widths) - 2 * (len(widths) - 1)
    if spare >= 0 or not sys.stdout.isatty():
        return [list(row) for row in rows]
    return [
        [_cut(cell, max(8, widths[i] + spare)) if i == shrink else cell for i, cell in enumerate(row)] for row in rows
    ]


def show(lines: Iterable[str]) -> None:
    """Print the lines."""
    for line in lines:
        click.echo(line)


def _cut(text: str, width: int) -> str:
    """The end of ``text``, where names differ."""
    return text if len(text) <= width else "…" + text[len(text) - width + 1 :]
