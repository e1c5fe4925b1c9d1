"""A file is hashed once, and again when it was changed."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import pytest

from streamtap.dataset import checked
from streamtap.dataset.checked import CheckedFiles
from streamtap.dataset.manifest import FileSum


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were read to hash them."""
    names: list[str] = []

    def noted(stream: object, name: str) -> object:
        names.append(Path(stream.name).name)  # type: ignore[attr-defined]
        return digest(stream, name)  # type: ignore[arg-type]

    digest = hashlib.file_digest
    monkeypatch.setattr(checked.hashlib, "file_digest", noted)
    return names


def sum_of(content: bytes) -> FileSum:
    return FileSum(len(content), hashlib.sha256(content).hexdigest())


def test_a_file_is_read_once_also_by_the_next_process(tmp_path: Path, hashed: list[str]) -> None:
    file = tmp_path / "x"
    file.write_bytes(b"rows")
    files = CheckedFiles(tmp_path / "deep" / "ledger")

    assert [files.is_whole(file, sum_of(b"rows")) for _ in range(3)] == [True] * 3
    assert CheckedFiles(tmp_path / "deep" / "ledger").is_whole(file, sum_of(b"rows"))
    assert hashed == ["x"]


def test_a_changed_file_is_read_again(tmp_path: Path, hashed: list[str]) -> None:
    file, files = tmp_path / "x", CheckedFiles(tmp_path)
    file.write_bytes(b"rows")
    os.utime(file, ns=(0, 1))
    assert files.is_whole(file, sum_of(b"rows"))
    file.write_bytes(b"ROWS")
    os.utime(file, ns=(0, 2))

    assert not files.is_whole(file, sum_of(b"rows"))
    assert not files.is_whole(file, sum_of(b"rows"))
    assert files.is_whole(file, sum_of(b"ROWS"))
    assert len(hashed) == 4


def test_another_file_in_its_place_is_read_again(tmp_path: Path) -> None:
    file, files = tmp_path / "x", CheckedFiles(tmp_path)
    file.write_bytes(b"rows")
    os.utime(file, ns=(0, 1))
    assert files.is_whole(file, sum_of(b"rows"))
    (tmp_path / "y").write_bytes(b"ROWS")
    os.utime(tmp_path / "y", ns=(0, 1))
    os.replace(tmp_path / "y", file)

    assert not files.is_whole(file, sum_of(b"rows"))


def test_another_hash_of_a_checked_file_is_not_taken_on_trust(tmp_path: Path) -> None:
    file, files = tmp_path / "x", CheckedFiles(tmp_path)
    file.write_bytes(b"rows")

    assert files.is_whole(file, sum_of(b"rows"))
    assert not files.is_whole(file, FileSum(4, "0" * 64))


def test_a_file_of_another_size_is_not_read(tmp_path: Path, hashed: list[str]) -> None:
    (tmp_path / "x").write_bytes(b"rows and more")

    assert not CheckedFiles(tmp_path).is_whole(tmp_path / "x", sum_of(b"rows"))
    assert hashed == []


def test_the_ledger_names_no_file(tmp_path: Path) -> None:
    (tmp_path / "secret-name").write_bytes(b"rows")
    CheckedFiles(tmp_path).is_whole(tmp_path / "secret-name", sum_of(b"rows"))

    assert re.fullmatch(r"\n[0-9a-f]{64}\n", (tmp_path / "checked.txt").read_text())


def test_a_line_cut_by_a_crash_is_no_harm(tmp_path: Path, hashed: list[str]) -> None:
    (tmp_path / "checked.txt").write_bytes(b"abc\xff")
    (tmp_path / "x").write_bytes(b"rows")
    for _ in range(2):
        assert CheckedFiles(tmp_path).is_whole(tmp_path / "x", sum_of(b"rows"))

    assert hashed == ["x"]
