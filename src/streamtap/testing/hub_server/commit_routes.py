"""Writing: which files go to LFS, and the commit itself."""

from __future__ import annotations

import base64
import os
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from streamtap.testing.hub_server.attributes import goes_to_lfs, lfs_patterns
from streamtap.testing.hub_server.changes import changed, operations_of
from streamtap.testing.hub_server.repositories import PLURALS
from streamtap.testing.hub_server.repository import Commit, Entry, Repository
from streamtap.testing.hub_server.shared import (
    Hub,
    commit_at,
    hub_of,
    json_body,
    page_of,
    param,
    refusal,
    writing,
)


async def preupload(request: Request) -> Response:
    """``POST /api/{repository}/preupload/{revision}``: how each file is to be sent, and what is there now."""
    repository = writing(request)
    commit = commit_at(request, repository)
    patterns = patterns_of(repository, commit)
    asked = (await json_body(request)).get("files", [])
    try:
        modes = [_mode(file, commit, patterns) for file in asked]
    except (KeyError, TypeError, ValueError) as error:
        raise refusal(400, "each file must have a path, a size and a sample in base64") from error
    return JSONResponse({"commitOid": commit.id, "files": modes})


def patterns_of(repository: Repository, commit: Commit) -> list[str]:
    """The patterns of LFS files at that commit."""
    entry = commit.tree.get(".gitattributes")
    return lfs_patterns(repository.content(entry).read_text("utf-8", "replace")) if entry else []


def _mode(file: dict[str, Any], commit: Commit, patterns: list[str]) -> dict[str, Any]:
    path, sample = file["path"], base64.b64decode(file.get("sample", ""))
    lfs = goes_to_lfs(path, file["size"], sample, patterns)
    mode: dict[str, Any] = {"path": path, "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False}
    there = commit.tree.get(path)
    return mode | ({"oid": _oid(there)} if there else {})


def _oid(entry: Entry) -> str:
    # The client compares with the hash it would upload by, which for LFS is not git's.
    return entry.sha256 if entry.lfs else entry.oid


async def validate_yaml(request: Request) -> Response:
    """``POST /api/validate-yaml``: whether a card has metadata between its fences; what they say is not checked."""
    content = (await json_body(request)).get("content", "")
    if not content.startswith("---"):
        return JSONResponse({"errors": [], "warnings": [{"message": "empty or missing yaml metadata in repo card"}]})
    if "\n---" not in content[3:]:
        return JSONResponse({"errors": [{"message": "the metadata has no end"}], "warnings": []}, 400)
    return JSONResponse({"errors": [], "warnings": []})


async def commit(request: Request) -> Response:
    """``POST /api/{repository}/commit/{branch}``: all of the changes, or none."""
    repository, branch = writing(request), param(request, "rev")
    if request.query_params.get("create_pr"):
        raise refusal(403, "this server keeps no pull requests; commit to a branch")
    try:
        header, operations = operations_of(await request.body())
    except (ValueError, KeyError) as error:
        raise refusal(400, f"not a commit: {error}") from error
    with repository.lock:
        before = _branch_head(repository, branch, header.get("parentCommit"))
        after = _changed(hub_of(request), repository, before, operations)
        new = repository.add_commit(
            branch,
            after,
            title=str(header.get("summary", "")),
            message=str(header.get("description", "")),
            author=hub_of(request).user,
        )
    url = f"{hub_of(request).endpoint}/{page_of(repository)}/commit/{new.id}"
    return JSONResponse({"success": True, "commitOid": new.id, "commitUrl": url, "hookOutput": ""})


def _branch_head(repository: Repository, branch: str, parent: str | None) -> Commit:
    head = repository.commit_of(repository.state.branches.get(branch, ""))
    if head is None:
        raise refusal(404, f"Invalid rev id: {branch} is no branch", "RevisionNotFound")
    if parent and not head.id.startswith(parent):
        raise refusal(412, "another commit was made since; read the repository again and retry")
    return head


def _changed(
    hub: Hub, repository: Repository, before: Commit, operations: list[tuple[str, dict[str, Any]]]
) -> dict[str, Entry]:
    def bring(into: Repository, sha256: str) -> str | None:
        return _bring(hub, into, sha256)

    try:
        return changed(repository, before.tree, operations, bring)
    except FileNotFoundError as error:
        raise refusal(404, f"{error} does not exist", "EntryNotFound") from error
    except ValueError as error:
        raise refusal(400, str(error)) from error


def _bring(hub: Hub, repository: Repository, sha256: str) -> str | None:
    """Make sure that an LFS object is here, from Xet or, for a copy, from another repository; its Xet hash."""
    target = repository.lfs.path(sha256)
    if not target.is_file() and not _fetched(hub, repository, sha256):
        others = (other for kind in PLURALS for other in hub.repositories.every(kind))
        if source := next((other for other in others if other.lfs.has(sha256)), None):
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(source.lfs.path(sha256), target)
    return hub.xet.hash_of(target) if hub.xet and target.is_file() else None


def _fetched(hub: Hub, repository: Repository, sha256: str) -> bool:
    draft = repository.folder / "lfs" / f".xet-{sha256}"
    if hub.xet is None or not hub.xet.fetch(sha256, draft):
        return False
    hub.sent[sha256] += 1
    try:
        return repository.lfs.put_file(draft) == sha256
    finally:
        draft.unlink()


ROUTES = [
    Route("/api/validate-yaml", validate_yaml, methods=["POST"]),
    Route("/api/{kind}/{namespace}/{name}/preupload/{rev}", preupload, methods=["POST"]),
    Route("/api/{kind}/{namespace}/{name}/commit/{rev}", commit, methods=["POST"]),
]
