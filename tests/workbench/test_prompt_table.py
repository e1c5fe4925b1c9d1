from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamtap.errors import InvalidInput
from streamtap.workbench.prompt_files import read_prompts
from streamtap.workbench.prompt_table import read_beside

SECRET = "a text that is nobody's business"


def file(folder: Path, name: str, content: str) -> Path:
    path = folder / name
    path.write_text(content, encoding="utf-8", newline="")
    return path


def column(path: Path, **options: Any) -> list[Any]:
    return read_beside(path, ["x"], **options)["x"]


def test_jsonl_keeps_the_kinds_of_values(tmp_path: Path) -> None:
    values = [1, 2.5, "three", None, True, [4], {"five": 5}]
    path = file(tmp_path, "p.jsonl", "".join(json.dumps({"text": "a", "x": value}) + "\n" for value in values))

    assert column(path) == values
    assert column(path, limit=2) == values[:2]


def test_lines_are_those_of_the_prompts(tmp_path: Path) -> None:
    """A byte order mark, line ends of Windows, odd breaks within a value, and a blank line at the end."""
    lines = ['{"text": "one\u2028one", "x": 1}', '{"text": "two",\r "x": 2}', "\t"]
    path = file(tmp_path, "p.jsonl", "\ufeff" + "\r\n".join(lines))

    assert column(path) == [1, 2]
    assert [prompt.text for prompt in read_prompts(path)] == ["one\u2028one", "two"]


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ('{"text": "b", "y": 1}', "p.jsonl, line 2 has no 'x'; it has 'text', 'y'."),
        ("{}", "p.jsonl, line 2 has no 'x'; it has none."),
        (f'"{SECRET}"', "p.jsonl, line 2 has no 'x'; it has no keys."),
        (f'{{"text": "{SECRET}"', "p.jsonl, line 2 is not JSON; each line must be one JSON value."),
    ],
)
def test_a_line_without_the_column_is_named(second: str, said: str, tmp_path: Path) -> None:
    path = file(tmp_path, "p.jsonl", f'{{"text": "a", "x": 1}}\n{second}\n')

    with pytest.raises(InvalidInput) as caught:
        column(path)
    assert str(caught.value) == said


@pytest.mark.parametrize(
    ("cells", "values"),
    [
        (["1", "-2", "0"], [1, -2, 0]),
        (["1", "", "3"], [1, None, 3]),
        (["1", "2.5", "1e-3"], [1.0, 2.5, 0.001]),
        (["1", "two"], ["1", "two"]),
        (["", "", ""], [None, None, None]),
        (["007", "012"], ["007", "012"]),
        (["1_000", "2"], ["1_000", "2"]),
        (["nan", "inf"], ["nan", "inf"]),
        (["٣", "2"], ["٣", "2"]),
        ([" 1", "2"], [" 1", "2"]),
        (["True", "False"], ["True", "False"]),
        (["9223372036854775807", "1"], [9223372036854775807, 1]),
        (["9223372036854775808", "1"], [9223372036854775808.0, 1.0]),
    ],
)
def test_cells_are_numbers_where_all_are(cells: list[str], values: list[Any], tmp_path: Path) -> None:
    path = file(tmp_path, "p.csv", "text,x\n" + "".join(f"some,{cell}\n" for cell in cells))
    found = column(path)

    assert found == values
    assert [type(value) for value in found] == [type(value) for value in values]


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1))
def test_ints_come_back(tmp_path_factory: pytest.TempPathFactory, numbers: list[int]) -> None:
    path = file(tmp_path_factory.mktemp("p"), "p.csv", "x,text\n" + "".join(f"{number},some\n" for number in numbers))

    assert column(path) == numbers


def test_csv_and_tsv_agree_with_the_prompts(tmp_path: Path) -> None:
    rows = [("text", "x"), ('"one\nline"', "a"), ("two", "b"), ("three", "c")]
    for name, between in (("p.csv", ","), ("p.tsv", "\t")):
        path = file(tmp_path, name, "".join(between.join(row) + "\r\n" for row in rows) + "\r\n")
        assert column(path) == ["a", "b", "c"]
        assert column(path, limit=2) == ["a", "b"]
        assert len(read_prompts(path)) == 3


def test_the_format_may_be_named(tmp_path: Path) -> None:
    assert column(file(tmp_path, "p.data", "text\tx\na\t1\n"), file_format="tsv") == [1]


def test_parquet_keeps_its_types(tmp_path: Path) -> None:
    day = datetime.datetime(2024, 5, 6, 7, 8, tzinfo=datetime.UTC)
    columns = {"text": ["a", "b"], "x": [1, None], "when": [day, None], "tags": [["p"], []], "wide": [0.5, 2.0]}
    pq.write_table(pa.table(columns), tmp_path / "p.parquet")
    wanted = ["wide", "x", "when", "tags"]

    assert read_beside(tmp_path / "p.parquet", wanted) == {name: columns[name] for name in wanted}
    assert list(read_beside(tmp_path / "p.parquet", wanted)) == wanted
    assert read_beside(tmp_path / "p.parquet", ["x"], limit=1) == {"x": [1]}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("p.txt", "one\n", "p.txt is plain text, which has no columns; give JSONL, CSV or Parquet."),
        ("p.csv", "text,y\na,1\n", "p.csv has no column 'x'; it has 'text', 'y'."),
        ("p.parquet", "PAR1", "p.parquet is not a Parquet file."),
        ("p.docx", "x", "p.docx: the ending '.docx' does not say what the file is; name the format"),
    ],
)
def test_what_has_no_such_column_says_so(name: str, content: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as caught:
        column(file(tmp_path, name, content))
    assert str(caught.value).startswith(said)


def test_a_parquet_file_without_the_column_says_so(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a"]}), tmp_path / "p.parquet")

    with pytest.raises(InvalidInput, match=r"^p\.parquet has no column 'x'; it has 'text'\.$"):
        column(tmp_path / "p.parquet")
