"""True and false statements of our own, built from tables of facts by one rule.

``subjects.csv`` names each subject's table and its sentence. A table's facts go two by
two: both are stated truly, and then each borrows the other's object, which must make it
false. Within such a pair every word stands equally often in true and in false sentences,
so no count of words tells them apart, and a split that keeps pairs whole holds back
entities that were never seen.

The subjects are ones that a small model knows something about. Authors of books were tried
and left out: on the demo model no layer did clearly better than chance. No single fact was chosen so.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

from streamtap.errors import InvalidInput


@dataclass(frozen=True)
class Fact:
    """An entity and the object that makes its sentence true; ``also`` are others that would."""

    entity: str
    object: str
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class Table:
    """One subject: a sentence with ``{entity}`` and ``{object}`` in it, and its facts in pairs."""

    subject: str
    template: str
    facts: tuple[Fact, ...]

    def sentence(self, entity: str, thing: str) -> str:
        """The statement that ``thing`` is the object of ``entity``, with a capital first."""
        text = self.template.format(entity=entity, object=thing)
        return text[0].upper() + text[1:]


@dataclass(frozen=True, eq=False)
class Statements:
    """Labelled statements, side by side.

    ``labels`` is int32 [statements], 1 where the statement is true; ``subjects`` names each
    one's table; ``groups`` is int64 [statements]: statements of one group are about the same
    two entities and belong on one side of a split.
    """

    texts: tuple[str, ...]
    labels: NDArray[np.int32]
    subjects: tuple[str, ...]
    groups: NDArray[np.int64]

    def __len__(self) -> int:
        """Number of statements."""
        return len(self.texts)


def load_statements() -> Statements:
    """The labelled set that ships with the package: the same statements in the same order every time."""
    return build_statements(load_tables())


def load_tables() -> tuple[Table, ...]:
    """The tables of facts that the statements are made of, in the order of ``subjects.csv``."""
    return tuple(
        Table(row["subject"], row["template"], tuple(_fact(fact) for fact in _read_csv(row["table"])))
        for row in _read_csv("subjects.csv")
    )


def build_statements(tables: Iterable[Table]) -> Statements:
    """Every fact of ``tables`` stated once truly and once falsely.

    Raises:
        InvalidInput: a table with an odd number of facts, a borrowed object that would be true
            too, or an entity in two pairs, which a split could then not keep on one side.
    """
    texts: list[str] = []
    subjects: list[str] = []
    seen: set[str] = set()
    for table in tables:
        for pair in _pairs(table):
            _check_unseen(table, pair, seen)
            texts += _four_sentences(table, *pair)
            subjects += [table.subject] * 4
    n_groups = len(texts) // 4
    return Statements(
        texts=tuple(texts),
        labels=np.tile(np.asarray([1, 0, 1, 0], np.int32), n_groups),
        subjects=tuple(subjects),
        groups=np.repeat(np.arange(n_groups, dtype=np.int64), 4),
    )


def _pairs(table: Table) -> list[tuple[Fact, Fact]]:
    if len(table.facts) % 2:
        raise InvalidInput(
            f"table {table.subject!r} has {len(table.facts)} facts; expected an even number, since they go in pairs."
        )
    return list(zip(table.facts[::2], table.facts[1::2], strict=True))


def _four_sentences(table: Table, one: Fact, other: Fact) -> list[str]:
    """True, false, true, false: each fact, and then its entity with the other's object."""
    for fact, borrowed in ((one, other.object), (other, one.object)):
        if borrowed == fact.object or borrowed in fact.also:
            raise InvalidInput(
                f"table {table.subject!r}: {fact.entity!r} cannot borrow {borrowed!r}, which is true of it; "
                "pair it with another fact."
            )
    return [
        table.sentence(one.entity, one.object),
        table.sentence(one.entity, other.object),
        table.sentence(other.entity, other.object),
        table.sentence(other.entity, one.object),
    ]


def _check_unseen(table: Table, pair: Sequence[Fact], seen: set[str]) -> None:
    for fact in pair:
        name = fact.entity.casefold()
        if name in seen:
            raise InvalidInput(
                f"table {table.subject!r}: {fact.entity!r} is in an earlier pair; use each entity once, "
                "so that all that is said of it stays on one side of a split."
            )
        seen.add(name)


def _fact(row: dict[str, str]) -> Fact:
    also = tuple(each.strip() for each in row.get("also", "").split(";") if each.strip())
    return Fact(row["entity"], row["object"], also)


def _read_csv(name: str) -> list[dict[str, str]]:
    text = files(__package__).joinpath(name).read_text(encoding="utf-8")
    return list(csv.DictReader(text.splitlines()))
