"""Documents of files and of the Hub: every row once, in order, under its number, without holding the corpus."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets  # noqa: F401 - before a client is told where to go
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants

from streamtap.errors import DatasetNotFound, InvalidInput, MissingExtra
from streamtap.spec import Prompt
from streamtap.testing.hub_server import HubServer, online_client
from streamtap.workbench.documents import Corpus, open_corpus


def rows(corpus: Corpus) -> list[tuple[int, str | None]]:
    return [(each.number, each.content.text if isinstance(each.content, Prompt) else None) for each in corpus.documents]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_text("one\n\n  \nfour")
    return path


def test_a_line_of_text_is_a_document_and_blank_ones_keep_their_row(text: Path) -> None:
    corpus = open_corpus(text)

    assert corpus.n_rows == 4
    assert rows(corpus) == [(0, "one"), (1, None), (2, None), (3, "four")]


@pytest.mark.parametrize("content", ["a", "a\n", "a\nb", "a\n\nb\n", "a\r\nb\r\n"])
def test_rows_of_text_are_counted_as_they_are_read(tmp_path: Path, content: str) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(content.encode())
    corpus = open_corpus(path)

    assert len(rows(corpus)) == corpus.n_rows


def test_jsonl_gives_text_chats_and_token_ids(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    chat = [{"role": "user", "content": "hi"}]
    values: list[Any] = [{"text": "a"}, {"text": ""}, {"text": None}, {"text": chat}, {"text": [5, 6]}, {"text": []}]
    path.write_text("\n".join(map(json.dumps, values)))

    found = list(open_corpus(path).documents)
    contents = [each.content for each in found]
    assert [each.number for each in found] == list(range(6))
    assert (contents[1], contents[2], contents[5]) == (None, None, None)
    assert isinstance(contents[3], Prompt)
    assert contents[3].messages == (("user", "hi"),)
    assert isinstance(contents[4], Prompt)
    assert contents[4].token_ids == (5, 6)
    assert open_corpus(path).n_rows == 6


def test_parquet_and_csv(tmp_path: Path) -> None:
    table = pa.table({"text": ["a", "", None, "d"], "other": [1, 2, 3, 4]})
    pq.write_table(table, tmp_path / "c.parquet")
    (tmp_path / "c.csv").write_text('id,text\n1,a\n2,""\n3,"c\nd"\n')

    parquet, csv = open_corpus(tmp_path / "c.parquet"), open_corpus(tmp_path / "c.csv")
    assert (parquet.n_rows, rows(parquet)) == (4, [(0, "a"), (1, None), (2, None), (3, "d")])
    assert (csv.n_rows, rows(csv)) == (None, [(0, "a"), (1, None), (2, "c\nd")])
    assert rows(open_corpus(tmp_path / "c.parquet", column="text", limit=2)) == [(0, "a"), (1, None)]
    assert open_corpus(tmp_path / "c.parquet", limit=3).n_rows == 3
    with pytest.raises(InvalidInput, match=r"c.parquet, row 0, 'other' holds a int"):
        open_corpus(tmp_path / "c.parquet", column="other")
    with pytest.raises(InvalidInput, match=r"has no column 'words'"):
        open_corpus(tmp_path / "c.parquet", column="words")


def test_a_stream_is_text_of_unknown_length() -> None:
    corpus = open_corpus(io.BytesIO(b"a\nb\n"))

    assert (corpus.n_rows, rows(corpus)) == (None, [(0, "a"), (1, "b")])


def test_prompts_may_not_be_blank_but_the_last(text: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"corpus.txt, line 2 is blank; expected a prompt"):
        list(open_corpus(text).prompts())
    (tmp_path / "p.txt").write_text("a\nb\n\n")
    assert [each.text for each in open_corpus(tmp_path / "p.txt").prompts()] == ["a", "b"]


def test_what_cannot_be_read_is_refused_at_once(tmp_path: Path, text: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "bad.jsonl").write_text("{\n")
    (tmp_path / "bad.parquet").write_text("no")
    for path, said in {
        "empty.txt": "empty.txt holds no document",
        "bad.jsonl": "bad.jsonl, line 1 is not JSON",
        "bad.parquet": "bad.parquet is not a Parquet file",
        "thing.zip": "the ending '.zip' does not say what the file is",
    }.items():
        with pytest.raises(InvalidInput, match=said):
            open_corpus(tmp_path / path)
    with pytest.raises(FileNotFoundError):
        open_corpus(tmp_path / "none.txt")
    with pytest.raises(InvalidInput, match="split and revision are of datasets on the Hub"):
        open_corpus(text, split="test")
    with pytest.raises(InvalidInput, match="limit must be at least 1"):
        open_corpus(text, limit=0)


def test_a_late_row_that_is_no_document_is_named(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('"a"\n5\n')
    corpus = open_corpus(path)

    with pytest.raises(InvalidInput, match=r"c.jsonl, line 2 holds a int; expected text"):
        list(corpus.documents)


def test_files_are_read_as_they_are_needed(tmp_path: Path) -> None:
    jsonl, parquet = tmp_path / "c.jsonl", tmp_path / "c.parquet"
    with jsonl.open("w") as file:
        file.writelines(json.dumps({"text": f"document {i}"}) + "\n" for i in range(20_000))
        file.write("not JSON\n")
    assert open_corpus(jsonl).n_rows == 20_001
    found = open_corpus(jsonl).documents
    assert [next(found).number for _ in range(5)] == list(range(5))

    pq.write_table(pa.table({"text": [f"document {i}" for i in range(20_000)]}), parquet, row_group_size=1000)
    assert rows(open_corpus(parquet)) == [(i, f"document {i}") for i in range(20_000)]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    folder = tmp_path_factory.mktemp("hub")
    with HubServer(folder / "served") as server, online_client(server), pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
        patch.setenv("HF_TOKEN", server.token)
        for name, configs in (
            ("tester/table", "- config_name: default\n  data_files:\n"
             "  - {split: train, path: data/train-*}\n  - {split: test, path: data/test-*}\n"),
            ("tester/several", "- config_name: one\n  data_files: data/train-*\n"
             "- config_name: two\n  data_files: data/test-*\n"),
        ):  # fmt: skip
            local = folder / name
            (local / "data").mkdir(parents=True)
            for part in range(2):
                texts = [f"train {part} {i}" if i else "" for i in range(3)]
                table = pa.table({"id": list(range(3)), "body": texts})
                pq.write_table(table, local / "data" / f"train-{part}.parquet")
            pq.write_table(pa.table({"id": [7], "body": ["test"]}), local / "data" / "test-0.parquet")
            (local / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
            server.add(name, local, private=False)
        yield server


TRAIN = [(0, None), (1, "train 0 1"), (2, "train 0 2"), (3, None), (4, "train 1 1"), (5, "train 1 2")]


@pytest.mark.parametrize("name", ["tester/table", "hf://tester/table", "hf://datasets/tester/table"])
def test_a_dataset_of_the_hub_is_streamed(hub: HubServer, name: str) -> None:
    corpus = open_corpus(name)

    assert corpus.name == name
    assert rows(corpus) == TRAIN
    assert corpus.n_rows in (6, None)


def test_split_config_column_and_limit_of_a_dataset(hub: HubServer) -> None:
    assert rows(open_corpus("tester/table", split="test")) == [(0, "test")]
    assert rows(open_corpus("tester/table", column="body", limit=2)) == TRAIN[:2]
    assert rows(open_corpus("tester/several", config="two")) == [(0, "test")]
    assert rows(open_corpus("hf://tester/table@main")) == TRAIN


@pytest.mark.parametrize(
    ("name", "options", "error", "said"),
    [
        ("tester/nothing", {}, DatasetNotFound, "there is no dataset tester/nothing on the Hub"),
        ("tester/table", {"column": "text"}, InvalidInput, r"tester/table has no column 'text'; its columns are 'id'"),
        ("tester/table", {"split": "valid"}, InvalidInput, r"tester/table cannot be read: .*valid"),
        ("tester/several", {}, InvalidInput, r"tester/several cannot be read: Config name is missing"),
        ("tester/table", {"column": "id"}, InvalidInput, r"tester/table, row 0, 'id' holds a int"),
        ("tester/table", {"file_format": "text"}, InvalidInput, "says itself what it is; leave the format out"),
        ("tester/table", {"limit": 0}, InvalidInput, "limit must be at least 1"),
        ("hf://tester/table@main", {"revision": "v2"}, InvalidInput, "the name says revision 'main'"),
    ],
)
def test_what_a_dataset_has_not_is_one_sentence(
    hub: HubServer, name: str, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        open_corpus(name, **options)


def test_a_file_of_such_a_name_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "prompts").write_text("a\n")

    assert rows(open_corpus("data/prompts")) == [(0, "a")]
    with pytest.raises(FileNotFoundError):
        open_corpus("data/none.txt")


def test_without_the_library_it_is_the_command_that_adds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)

    with pytest.raises(MissingExtra, match=r"pip install 'streamtap\[corpora\]'"):
        open_corpus("tester/table")
