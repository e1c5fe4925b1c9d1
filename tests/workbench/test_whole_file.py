from __future__ import annotations

from pathlib import Path

import pytest

from streamtap.workbench.whole_file import write_whole


def test_it_writes_and_makes_the_folder(tmp_path: Path) -> None:
    target = write_whole(tmp_path / "new" / "page.html", b"first")
    assert target.read_bytes() == b"first"
    assert [file.name for file in target.parent.iterdir()] == ["page.html"]


def test_it_replaces_what_was_there(tmp_path: Path) -> None:
    write_whole(tmp_path / "page.html", b"a long first version")
    write_whole(str(tmp_path / "page.html"), b"second")
    assert (tmp_path / "page.html").read_bytes() == b"second"


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "kept.txt").write_text("kept")
    with pytest.raises(OSError, match="taken"):
        write_whole(tmp_path / "taken", b"content")
    assert [file.name for file in tmp_path.iterdir()] == ["taken"]
    assert (tmp_path / "taken" / "kept.txt").read_text() == "kept"
