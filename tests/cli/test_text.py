from __future__ import annotations

import os
import sys

import pytest

from streamtap.cli import text
from streamtap.cli.text import columns, counted, fitting, number_ranges, size


@pytest.mark.parametrize(
    ("count_bytes", "shown"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (13_449_000, "13.4 MB"), (999_960, "1.0 MB"), (5e15, "5000.0 TB")],
)
def test_sizes(count_bytes: float, shown: str) -> None:
    assert size(count_bytes) == shown


def test_one_is_not_many() -> None:
    assert [counted(n, "row") for n in (0, 1, 2)] == ["0 rows", "1 row", "2 rows"]


def test_numbers_in_a_row_become_a_range() -> None:
    assert number_ranges([0, 1, 2, 3]) == "0-3"
    assert number_ranges([22, 4, 8, 20, 21]) == "4,8,20-22"
    assert number_ranges([]) == ""


def test_columns_are_aligned() -> None:
    assert columns([["a", "1", "x"], ["bbb", "10", ""]], right=(1,)) == ["a     1  x", "bbb  10"]


def test_a_table_is_cut_for_a_narrow_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [["1", "a-very-long-organisation/model", "984"], ["2", "short", "3"]]
    monkeypatch.setattr(text.shutil, "get_terminal_size", lambda: os.terminal_size((24, 24)))

    monkeypatch.setattr(sys.stdout, "isatty", lambda: False)
    assert fitting(rows, shrink=1) == rows

    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    cut = fitting(rows, shrink=1)
    assert cut == [["1", "…anisation/model", "984"], ["2", "short", "3"]]
    assert max(map(len, columns(cut))) == 24
