"""A corpus as a stream of documents, each with its row: a text, JSONL, CSV or Parquet file, or a Hub text dataset.

Nothing is held but a few rows (of CSV and TSV the whole file), so that a corpus may be larger than memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from streamtap.errors import InvalidInput
from streamtap.harvest.windows import Document
from streamtap.spec import Prompt
from streamtap.workbench.prompt_files import as_prompt, format_of, parquet_length, row_values

_HUB = re.compile(r"(?:hf://(?:datasets/)?)?([\w-][\w.-]*/[\w-][\w.-]*?)(?:@([\w./-]+))?", re.ASCII)
_READ_BYTES = 1 << 20
#: Lines of larger files are not counted, which would take longer than anybody waits to see how many they are.
_MOST_COUNTED_BYTES = 2 << 30


@dataclass(frozen=True, eq=False)
class Corpus:
    """``documents`` in order, to be gone through once; ``n_rows`` how many there are, where that is known."""

    name: str
    documents: Iterator[Document]
    n_rows: int | None

    def prompts(self) -> Iterator[Prompt]:
        """Each document as one prompt; none may be blank but the last.

        Raises:
            InvalidInput: one is, or is not a prompt; its line or row is named.
        """
        blank: Document | None = None
        for document in self.documents:
            if blank is not None:
                raise InvalidInput(
                    f"{blank.place} is blank; expected a prompt. Remove it, or fill it; documents that are cut into "
                    "windows may be blank."
                )
            if isinstance(document.content, Prompt):
                yield document.content
            else:
                blank = document


def open_corpus(
    source: str | Path | BinaryIO,
    *,
    file_format: str | None = None,
    column: str | None = None,
    limit: int | None = None,
    config: str | None = None,
    split: str | None = None,
    revision: str | None = None,
) -> Corpus:
    """The documents of ``source``, of which the first is read at once.

    A document is what ``prompt_files.read_prompts`` takes for a prompt: a line of text, a value in ``column`` or of a
    line of JSONL. Blank ones are kept, as rows with nothing in them.

    Args:
        source: A path, an open binary stream, or ``user/name`` or ``hf://datasets/user/name[@revision]`` on the Hub.
        file_format: One of ``prompt_files.FORMATS``; by default what the file's name says, and text for a stream.
        column: Where the documents are; by default ``prompt`` or ``text``, or the only column that can hold them.
        limit: Only so many rows, from the start.
        config: Of a dataset on the Hub that has several.
        split: Of a dataset on the Hub; by default ``train``.
        revision: Of a dataset on the Hub: branch, tag or commit.

    Raises:
        InvalidInput: the source, format or column is not clear or not there, or the first row is no document.
        DatasetNotFound: there is no such dataset.
        MissingExtra: reading from the Hub needs what is not installed.
        OSError: the file cannot be read.
    """
    if isinstance(source, str) and (found := _on_the_hub(source)):
        if file_format is not None:
            raise InvalidInput(f"{source} is a dataset on the Hub, which says itself what it is; leave the format out.")
        opened = _hub_rows(found[0], column, limit, config, split, _one_revision(found[1], revision))
        return _corpus(source, *opened)
    if (config, split, revision) != (None, None, None):
        raise InvalidInput("config, split and revision are of datasets on the Hub; a file has none.")
    if isinstance(source, str | Path):
        path = Path(source)
        kind = file_format or format_of(path)
        return _corpus(path.name, _file_rows(path, kind, column, limit), _count(path, kind, limit))
    name = "standard input"
    values = row_values(source, name, file_format or "text", column=column, limit=limit, blank_lines=True)
    return _corpus(name, values, None)


def _corpus(name: str, values: Iterable[tuple[str, Any]], n_rows: int | None) -> Corpus:
    documents = (_document(value, place, number) for number, (place, value) in enumerate(values))
    first = next(documents, None)
    if first is None:
        raise InvalidInput(f"{name} holds no document.")
    return Corpus(name, chain([first], documents), n_rows)


def _document(value: Any, place: str, number: int) -> Document:
    is_blank = value is None or value == [] or (isinstance(value, str) and not value.strip())
    return Document(number, None if is_blank else as_prompt(value, place, number), place)


def _file_rows(path: Path, kind: str, column: str | None, limit: int | None) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as stream:
        yield from row_values(stream, path.name, kind, column=column, limit=limit, blank_lines=True)


def _count(path: Path, kind: str, limit: int | None) -> int | None:
    if kind in ("csv", "tsv"):
        return None  # cells may hold line feeds
    if kind != "parquet" and path.stat().st_size > _MOST_COUNTED_BYTES:
        return None
    length = parquet_length(path) if kind == "parquet" else _lines(path)
    return length if limit is None else min(length, limit)


def _lines(path: Path) -> int:
    count, last = 0, b"\n"
    with path.open("rb", buffering=0) as stream:
        while block := stream.read(_READ_BYTES):
            count, last = count + block.count(b"\n"), block[-1:]
    return count + (last != b"\n")


def _on_the_hub(source: str) -> tuple[str, str | None] | None:
    """Name and revision of a dataset on the Hub; a file of that name, or a name of a file, is none."""
    match = _HUB.fullmatch(source)
    if match is None or (not source.startswith("hf://") and (Path(source).exists() or Path(match[1]).suffix)):
        return None
    return match[1], match[2]


def _one_revision(named: str | None, asked: str | None) -> str | None:
    if named is not None and asked not in (None, named):
        raise InvalidInput(f"the name says revision {named!r}, and {asked!r} was asked for; leave one of them out.")
    return named or asked


def _hub_rows(
    repository: str,
    column: str | None,
    limit: int | None,
    config: str | None,
    split: str | None,
    revision: str | None,
) -> tuple[Iterator[tuple[str, Any]], int | None]:
    from streamtap.workbench.hub_text import hub_values

    if limit is not None and limit < 1:
        raise InvalidInput(f"limit must be at least 1; got {limit}.")
    return hub_values(repository, column=column, limit=limit, config=config, split=split or "train", revision=revision)
