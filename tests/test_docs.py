"""Every link inside the documentation leads somewhere, and every Python snippet is Python."""

from __future__ import annotations

import ast
import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "changes").glob("*.md")),
]

_FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)[^)]*\)|<(?:img|a)\b[^>]*?(?:src|href)=\"([^\"]+)\"")
_HEADING = re.compile(r"^#+ +(.+?) *#*$", re.MULTILINE)
_OUTSIDE = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


def _prose(page: Path) -> str:
    return _FENCE.sub("", page.read_text(encoding="utf-8"))


def _links(page: Path) -> list[str]:
    targets = [markdown or html for markdown, html in _LINK.findall(_prose(page))]
    return [target for target in targets if not _OUTSIDE.match(target)]


def _anchors(page: Path) -> set[str]:
    """The names that a forge gives to the headings: lower case, no punctuation, dashes for spaces."""
    headings = (re.sub(r"[`*]", "", title).lower() for title in _HEADING.findall(_prose(page)))
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in headings}


def _leads_nowhere(page: Path, target: str) -> bool:
    place, _, anchor = target.partition("#")
    file = (page.parent / place).resolve() if place else page
    if not file.is_relative_to(ROOT) or not file.exists():
        return True
    return bool(anchor) and (file.suffix != ".md" or anchor not in _anchors(file))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    assert [target for target in _links(page) if _leads_nowhere(page, target)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_python_snippets_are_python(page: Path) -> None:
    snippets = [body for _, language, body in _FENCE.findall(page.read_text(encoding="utf-8")) if language == "python"]

    for snippet in snippets:
        ast.parse(textwrap.dedent(snippet), f"snippet of {page.name}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_no_placeholder_is_left(page: Path) -> None:
    assert "@@" not in page.read_text(encoding="utf-8")


def test_make_targets_named_in_the_documentation_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name for page in PAGES for name in re.findall(r"`make ([a-z]+)", page.read_text(encoding="utf-8"))}

    assert named <= targets


@pytest.mark.parametrize(
    ("target", "nowhere"),
    [("there.md", False), ("there.md#a-b-and-c", False), ("#here", False), ("gone.md", True), ("there.md#gone", True)],
)
def test_a_dead_link_is_seen(target: str, nowhere: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "there.md").write_text("## A `b`, and c\n")
    page = tmp_path / "page.md"
    page.write_text(f"# Here\n[link]({target})\n```\n[not a link](in-code.md)\n```\n")

    assert [_leads_nowhere(page, link) for link in _links(page)] == [nowhere]
