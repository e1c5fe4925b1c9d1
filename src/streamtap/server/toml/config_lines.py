"""Where in a TOML text each key stands; the standard library's reader does not say."""

from __future__ import annotations

import re
from collections.abc import Iterator

KeyPath = tuple[str | int, ...]

_HEADER = re.compile(r"\s*\[(\[?)([^\]]+)\]")
_KEY = re.compile(r"""\s*((?:[\w.\-\s]|"[^"]*"|'[^']*')+?)\s*=(.*)$""", re.DOTALL)
_PART = re.compile(r"""\s*(?:"([^"]*)"|'([^']*)'|([\w\-]+))\s*(?:\.|$)""")
_STRINGS = re.compile(r'"""|\'\'\'|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'|#[^\n]*|[\[{\]}]')


def find_line(text: str, path: KeyPath) -> int:
    """Line, from 1, of the key at ``path`` such as ``("models", 0, "dtype")``, or of the nearest table around it.

    ``text`` must be TOML that the standard library reads.
    """
    lines = dict(reversed(list(_keys(text))))  # a table that is opened twice stands where it was opened first
    for length in range(len(path), 0, -1):
        if path[:length] in lines:
            return lines[path[:length]]
    return 1


def _keys(text: str) -> Iterator[tuple[KeyPath, int]]:
    table: KeyPath = ()
    counts: dict[KeyPath, int] = {}
    for number, line in _statements(text):
        if header := _HEADER.match(line):
            table = _parts(header[2])
            if header[1]:
                yield table, number
                counts[table] = counts.get(table, -1) + 1
            table = _with_places(table, counts)
            yield table, number
        elif key := _KEY.match(line):
            inner = _parts(key[1])
            for length in range(1, len(inner) + 1):
                yield (*table, *inner[:length]), number


def _with_places(table: KeyPath, counts: dict[KeyPath, int]) -> KeyPath:
    """``models.extra`` as ``models, 1, extra`` while the second of the models is open."""
    placed: list[str | int] = []
    for length in range(1, len(table) + 1):
        placed.append(table[length - 1])
        if table[:length] in counts:
            placed.append(counts[table[:length]])
    return tuple(placed)


def _parts(dotted: str) -> KeyPath:
    return tuple(next(part for part in match.groups() if part is not None) for match in _PART.finditer(dotted))


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """First line of each statement and its number; what a value goes on with in further lines is left out."""
    depth, quote = 0, ""
    for number, line in enumerate(text.split("\n"), 1):
        if not depth and not quote and line.strip() and not line.lstrip().startswith("#"):
            yield number, line
        depth, quote = _after(line, depth, quote)


def _after(line: str, depth: int, quote: str) -> tuple[int, str]:
    """Open brackets, and the quotes of an open multi-line string, at the end of ``line``."""
    at = 0
    while at < len(line):
        if quote:
            end = line.find(quote, at)
            if end < 0:
                return depth, quote
            at, quote = end + 3, ""
            continue
        found = _STRINGS.search(line, at)
        if found is None:
            break
        at, token = found.end(), found[0]
        quote = token if token in ('"""', "'''") else ""
        depth += (token in "[{") - (token in "]}") if len(token) == 1 else 0
    return depth, quote
