"""The labelled set: balanced by construction, closed within groups, and readable."""

from __future__ import annotations

import re
from collections import Counter, defaultdict

import numpy as np
import pytest

from streamtap.errors import InvalidInput
from streamtap.workbench.statements import Fact, Table, build_statements, load_statements, load_tables

TABLES = load_tables()
STATEMENTS = load_statements()


def words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.casefold())


def table_of(*facts: Fact, subject: str = "capitals") -> Table:
    return Table(subject, "the capital of {entity} is {object}.", facts)


def test_there_are_enough_statements_of_enough_subjects() -> None:
    assert len(STATEMENTS) >= 300
    assert len(set(STATEMENTS.subjects)) >= 6
    assert len(STATEMENTS.texts) == len(STATEMENTS.labels) == len(STATEMENTS.subjects) == len(STATEMENTS.groups)
    assert STATEMENTS.labels.dtype == np.int32
    assert STATEMENTS.groups.dtype == np.int64


def test_every_table_states_each_fact_once_truly_and_once_falsely() -> None:
    for table in TABLES:
        labels = [
            int(label)
            for label, subject in zip(STATEMENTS.labels, STATEMENTS.subjects, strict=True)
            if subject == table.subject
        ]
        assert Counter(labels) == {1: len(table.facts), 0: len(table.facts)}


def test_statements_are_short_distinct_sentences() -> None:
    folded = [text.casefold() for text in STATEMENTS.texts]
    assert len(set(folded)) == len(folded)
    for text in STATEMENTS.texts:
        assert re.fullmatch(r"[A-Z]\S*( \S+){2,9}\.", text), text


def test_true_sentences_say_what_the_tables_say_and_false_ones_do_not() -> None:
    true = {
        table.sentence(fact.entity, thing)
        for table in TABLES
        for fact in table.facts
        for thing in (fact.object, *fact.also)
    }
    for text, label in zip(STATEMENTS.texts, STATEMENTS.labels, strict=True):
        assert (text in true) == bool(label), text


def test_every_word_stands_equally_often_in_true_and_false_sentences_of_each_group() -> None:
    counts: dict[int, tuple[Counter[str], Counter[str]]] = defaultdict(lambda: (Counter(), Counter()))
    for text, label, group in zip(STATEMENTS.texts, STATEMENTS.labels, STATEMENTS.groups, strict=True):
        counts[int(group)][int(label)].update(words(text))
    for false_words, true_words in counts.values():
        assert false_words == true_words


def test_no_entity_stands_in_two_groups() -> None:
    groups_of: dict[str, set[int]] = defaultdict(set)
    group_of_text = dict(zip(STATEMENTS.texts, STATEMENTS.groups.tolist(), strict=True))
    filler = {"a", "an", "the", "ripe", "clear"}
    for table in TABLES:
        for fact in table.facts:
            name = " ".join(word for word in words(fact.entity) if word not in filler)
            said = {table.sentence(fact.entity, other.object) for other in table.facts} & group_of_text.keys()
            assert len(said) == 2, fact
            groups_of[name] |= {group_of_text[text] for text in said}
    assert {name: groups for name, groups in groups_of.items() if len(groups) != 1} == {}


def test_an_object_of_a_fact_is_never_the_same_word_as_its_entity() -> None:
    for table in TABLES:
        for fact in table.facts:
            assert fact.entity.casefold() != fact.object.casefold()


def test_facts_are_clean_text() -> None:
    for table in TABLES:
        assert table.template.count("{entity}") == table.template.count("{object}") == 1
        for fact in table.facts:
            for part in (fact.entity, fact.object, *fact.also):
                assert part
                assert part == part.strip()


def test_loading_twice_gives_the_same() -> None:
    again = load_statements()
    assert again.texts == STATEMENTS.texts
    assert again.subjects == STATEMENTS.subjects
    np.testing.assert_array_equal(again.labels, STATEMENTS.labels)
    np.testing.assert_array_equal(again.groups, STATEMENTS.groups)


def test_a_pair_makes_four_statements_of_one_group() -> None:
    made = build_statements([table_of(Fact("Peru", "Lima"), Fact("Cuba", "Havana"))])
    assert made.texts == (
        "The capital of Peru is Lima.",
        "The capital of Peru is Havana.",
        "The capital of Cuba is Havana.",
        "The capital of Cuba is Lima.",
    )
    assert made.labels.tolist() == [1, 0, 1, 0]
    assert made.groups.tolist() == [0, 0, 0, 0]


def test_an_odd_number_of_facts_is_refused() -> None:
    with pytest.raises(InvalidInput, match="3 facts; expected an even number"):
        build_statements([table_of(Fact("Peru", "Lima"), Fact("Cuba", "Havana"), Fact("Iran", "Tehran"))])


@pytest.mark.parametrize("other", [Fact("Chile", "Spanish"), Fact("Cuba", "Quechua")])
def test_a_borrowed_object_that_is_true_is_refused(other: Fact) -> None:
    with pytest.raises(InvalidInput, match="'Peru' cannot borrow"):
        build_statements([table_of(Fact("Peru", "Spanish", also=("Aymara", "Quechua")), other)])


def test_an_entity_in_two_pairs_is_refused() -> None:
    first = table_of(Fact("Peru", "Lima"), Fact("Cuba", "Havana"))
    second = table_of(Fact("peru", "Spanish"), Fact("Iran", "Persian"), subject="languages")
    with pytest.raises(InvalidInput, match="table 'languages': 'peru' is in an earlier pair"):
        build_statements([first, second])
