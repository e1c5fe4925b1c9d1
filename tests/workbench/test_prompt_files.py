from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamtap.errors import InvalidInput
from streamtap.workbench.prompt_files import read_prompts, write_columns

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
SECRET = "a text that is nobody's business"


def _file(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def _texts(source: Any, **options: Any) -> list[str | None]:
    return [prompt.text for prompt in read_prompts(source, **options)]


def _refusal(source: Any, **options: Any) -> str:
    with pytest.raises(InvalidInput) as caught:
        read_prompts(source, **options)
    assert SECRET not in str(caught.value)
    return str(caught.value)


def test_text_is_a_prompt_a_line(tmp_path: Path) -> None:
    assert _texts(_file(tmp_path, "p.txt", "one\n  two \nthree")) == ["one", "  two ", "three"]


def test_text_knows_marks_of_windows_and_no_other_line_ends(tmp_path: Path) -> None:
    path = _file(tmp_path, "p.txt", "\ufeffone\r\ntwo\u2028still two\x0b\r\n")

    assert _texts(path) == ["one", "two\u2028still two\x0b"]


@pytest.mark.parametrize("blank", ["", "   ", "\t\r"])
def test_a_blank_line_is_refused_unless_it_is_the_last(blank: str, tmp_path: Path) -> None:
    last = _file(tmp_path, "last.txt", f"one\ntwo\n{blank}\n")
    within = _file(tmp_path, "within.txt", f"one\n{blank}\ntwo\n")
    two = _file(tmp_path, "two.txt", f"one\n{blank}\n{blank}\n")

    assert _texts(last) == ["one", "two"]
    assert "within.txt, line 2 is blank" in _refusal(within)
    assert "two.txt, line 2 is blank" in _refusal(two)


def test_text_that_is_not_utf8_is_refused_by_line(tmp_path: Path) -> None:
    assert "p.txt, line 2 is not UTF-8" in _refusal(_file(tmp_path, "p.txt", b"one\ncaf\xe9\n"))


def test_text_has_no_column(tmp_path: Path) -> None:
    assert "has no column 'text'" in _refusal(_file(tmp_path, "p.txt", "one"), column="text")


def test_jsonl_holds_texts_chats_and_token_ids(tmp_path: Path) -> None:
    values = [{"text": "one"}, "two", CHAT, [3, 4], {"text": CHAT}, {"text": [5]}]
    found = read_prompts(_file(tmp_path, "p.jsonl", "\n".join(map(json.dumps, values))))

    messages = (("user", "Hi"), ("assistant", "Hello"))
    assert [prompt.text for prompt in found] == ["one", "two", None, None, None, None]
    assert [prompt.messages for prompt in found] == [None, None, messages, None, messages, None]
    assert [prompt.token_ids for prompt in found] == [None, None, None, (3, 4), None, (5,)]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (['"one"', "{", '"two"'], "p.jsonl, line 2 is not JSON"),
        (['"one"', "", '"two"'], "p.jsonl, line 2 is blank"),
        (['{"text": "one"}', '{"prompt": "two"}'], "p.jsonl, line 2 has no 'text'; it has 'prompt'"),
        (['{"text": "one"}', '{"text": null}'], "p.jsonl, line 2, 'text' holds nothing"),
        (['{"text": "one"}', '{"text": 2}'], "p.jsonl, line 2, 'text' holds a int"),
        (['{"text": "one"}', '{"text": " "}'], "p.jsonl, line 2, 'text' is blank"),
        (['"one"', "[]"], "p.jsonl, line 2: prompt 1 is empty"),
        (['"one"', '[{"role": "user"}]'], "p.jsonl, line 2: prompt 1: each message needs"),
        (['{"prompt": "one", "text": "two"}'], "several columns that could hold the prompts"),
        (['{"id": 3}'], "no column that could hold the prompts; name one of its columns: 'id'."),
    ],
)
def test_jsonl_that_is_not_prompts_is_refused_by_line(lines: list[str], said: str, tmp_path: Path) -> None:
    assert said in _refusal(_file(tmp_path, "p.jsonl", "\n".join(lines)))


def test_a_column_that_is_named_must_be_in_every_line(tmp_path: Path) -> None:
    path = _file(tmp_path, "p.jsonl", f'{{"note": "one"}}\n"{SECRET}"')

    assert "p.jsonl, line 2 is not an object, so it has no 'note'" in _refusal(path, column="note")


@pytest.mark.parametrize(
    ("table", "column"),
    [
        ("label,prompt,note\n1,one,x\n", "prompt"),
        ("text,answer\none,yes\n", "text"),
        ("label,statement\n1,one\n0.5,two\n", "statement"),
        ("question\n42\n", None),
        ("question,answer\none,yes\n", None),
        ("prompt,text\none,two\n", None),
    ],
)
def test_the_column_is_taken_only_where_it_is_clear(table: str, column: str | None, tmp_path: Path) -> None:
    path = _file(tmp_path, "p.csv", table)

    if column is None:
        header = table.split("\n")[0].split(",")
        assert f"name one of its columns: {', '.join(map(repr, header))}." in _refusal(path)
        assert _texts(path, column=header[0])
    else:
        assert _texts(path) == _texts(path, column=column)


def test_csv_cells_may_hold_commas_lines_and_long_texts(tmp_path: Path) -> None:
    long = "word " * 60_000
    path = tmp_path / "p.csv"
    with path.open("w", newline="", encoding="utf-8-sig") as stream:
        csv.writer(stream).writerows([["text"], ["one,\ntwo"], [long], ['"quoted"']])

    assert _texts(path) == ["one,\ntwo", long, '"quoted"']
    assert csv.field_size_limit() == 131_072


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("text,label\none,1\ntwo\n", "p.csv, line 3 has 1 cells, and the header has 2"),
        ("text,label\none,1\n\ntwo,2\n", "p.csv, line 3 has 0 cells"),
        ("text,label\none,1\n,2\n", "p.csv, line 3, 'text' is blank"),
        ("text,text\none,1\n", "more than one column 'text'"),
        ('text\n"one\n', "p.csv, line 2 is not a well-formed table"),
        ("text\n", "p.csv holds no prompt"),
        ("", "p.csv is empty"),
    ],
)
def test_csv_that_is_not_prompts_is_refused(table: str, said: str, tmp_path: Path) -> None:
    assert said in _refusal(_file(tmp_path, "p.csv", table), column="text")


def test_a_limit_hides_no_fault_before_it(tmp_path: Path) -> None:
    path = _file(tmp_path, "p.csv", "text\none\n\ntwo\nthree\n")

    assert _texts(path, limit=1) == ["one"]
    assert "line 3 has 0 cells" in _refusal(path, limit=2)


def test_csv_may_end_with_a_blank_line_and_tsv_has_tabs(tmp_path: Path) -> None:
    assert _texts(_file(tmp_path, "p.csv", "text\none\n\n")) == ["one"]
    assert _texts(_file(tmp_path, "p.tsv", "text\tlabel\none, two\t1\n")) == ["one, two"]


@pytest.mark.parametrize(
    ("values", "kind"),
    [(["one", "two"], "text"), ([[3, 4], [5]], "token_ids"), ([CHAT, CHAT[:1]], "messages")],
)
def test_parquet_holds_texts_chats_and_token_ids(values: list[Any], kind: str, tmp_path: Path) -> None:
    pq.write_table(pa.table({"label": [1, 2], "score": [[0.5], [1.5]], "input": values}), tmp_path / "p.parquet")

    found = read_prompts(tmp_path / "p.parquet")

    assert len(found) == 2
    assert all(getattr(prompt, kind) is not None for prompt in found)
    assert [prompt.text for prompt in found] == (values if kind == "text" else [None, None])


def test_parquet_that_is_not_prompts_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"question": ["one", None], "answer": ["1", "2"]}), tmp_path / "p.parquet")

    assert "p.parquet, row 1, 'question' holds nothing" in _refusal(tmp_path / "p.parquet", column="question")
    assert "has no column 'text'; its columns are 'question', 'answer'" in _refusal(
        tmp_path / "p.parquet", column="text"
    )
    assert _texts(tmp_path / "p.parquet", column="question", limit=1) == ["one"]
    assert "not a Parquet file" in _refusal(_file(tmp_path, "q.parquet", SECRET))


def test_a_name_that_says_nothing_needs_the_format(tmp_path: Path) -> None:
    path = _file(tmp_path, "p.dat", '"one"\n')

    assert "the ending '.dat' does not say what the file is" in _refusal(path)
    assert _texts(path, file_format="jsonl") == ["one"]
    assert "the format must be one of text, jsonl, csv, tsv, parquet; got 'json'" in _refusal(path, file_format="json")


def test_a_stream_is_text_unless_said() -> None:
    assert _texts(io.BytesIO(b"one\ntwo\n")) == ["one", "two"]
    assert _texts(io.BytesIO(b"text\none\n"), file_format="csv") == ["one"]
    assert _refusal(io.BytesIO(b"")) == "standard input holds no prompt."


_PROMPTS = st.lists(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1).filter(str.strip),
    min_size=1,
    max_size=5,
)


@given(texts=_PROMPTS)
def test_texts_come_back_from_every_format(texts: list[str]) -> None:
    table, rows = io.StringIO(newline=""), io.BytesIO()
    csv.writer(table).writerows([["text"], *([text] for text in texts)])
    pq.write_table(pa.table({"text": texts}), rows)
    lines = "\n".join(json.dumps(text, ensure_ascii=False) for text in texts)

    assert _texts(io.BytesIO(table.getvalue().encode()), file_format="csv", column="text") == texts
    assert _texts(io.BytesIO(lines.encode()), file_format="jsonl") == texts
    assert _texts(io.BytesIO(rows.getvalue()), file_format="parquet", column="text") == texts


def test_columns_are_written_with_their_types(tmp_path: Path) -> None:
    columns = {"index": np.arange(2), "perplexity": np.array([1.5, np.nan]), "text": ["one", None]}
    write_columns(tmp_path / "c.parquet", columns)

    found = pq.read_table(tmp_path / "c.parquet")
    assert [str(field.type) for field in found.schema] == ["int64", "double", "string"]
    assert found["text"].to_pylist() == ["one", None]
