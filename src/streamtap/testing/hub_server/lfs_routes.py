"""Uploading large files: the LFS batch, then one PUT or one for each part, to the other origin."""

from __future__ import annotations

import asyncio
import shutil
from math import ceil
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from streamtap.testing.hub_server.file_routes import signed
from streamtap.testing.hub_server.objects import Draft, is_sha256, pieces_of
from streamtap.testing.hub_server.repositories import PLURALS
from streamtap.testing.hub_server.repository import Repository
from streamtap.testing.hub_server.shared import Hub, hub_of, json_body, page_of, param, refusal, writing

_MEDIA_TYPE = "application/vnd.git-lfs+json"


async def batch(request: Request) -> Response:
    """``POST /{repository}.git/info/lfs/objects/batch``: how to send each object that is not here yet."""
    repository = writing(request)
    body = await json_body(request)
    if body.get("operation") != "upload":
        raise refusal(400, "only the operation 'upload' is served here; read files by their address")
    objects = [_answer(hub_of(request), repository, asked) for asked in body.get("objects", [])]
    return JSONResponse({"transfer": "multipart", "objects": objects}, media_type=_MEDIA_TYPE)


def _answer(hub: Hub, repository: Repository, asked: dict[str, Any]) -> dict[str, Any]:
    oid, size = asked.get("oid", ""), asked.get("size", 0)
    if not is_sha256(oid) or not isinstance(size, int) or size < 0:
        return {"oid": str(oid), "size": 0, "error": {"code": 422, "message": "an object has a SHA-256 and a size"}}
    if repository.lfs.has(oid):
        return {"oid": oid, "size": size}
    git = f"/{page_of(repository)}.git/info/lfs"
    upload = _one_put(hub, repository, oid) if size <= hub.chunk_bytes else _parts(hub, repository, oid, size)
    verify = {"href": f"{hub.endpoint}{git}/objects/verify"}
    return {"oid": oid, "size": size, "authenticated": True, "actions": {"upload": upload, "verify": verify}}


def _one_put(hub: Hub, repository: Repository, oid: str) -> dict[str, Any]:
    return {"href": hub.signer.link(hub.cdn, "PUT", _place(repository, oid))}


def _parts(hub: Hub, repository: Repository, oid: str, size: int) -> dict[str, Any]:
    place = _place(repository, oid)
    numbers = range(1, ceil(size / hub.chunk_bytes) + 1)
    links = {f"{number:05d}": hub.signer.link(hub.cdn, "PUT", f"{place}/parts/{number}") for number in numbers}
    href = hub.signer.link(hub.endpoint, "POST", f"{place}/complete")
    return {"href": href, "header": {"chunk_size": str(hub.chunk_bytes), **links}}


async def put_object(request: Request) -> Response:
    """``PUT /cdn/{repository}/{sha256}``: a whole object."""
    repository, oid = signed(request, "PUT"), param(request, "oid")
    draft = repository.lfs.draft()
    try:
        await _receive(request, draft)
        _keep(hub_of(request), repository, draft, oid)
    finally:
        draft.drop()
    return Response(headers={"ETag": f'"{oid}"'})


async def put_part(request: Request) -> Response:
    """``PUT /cdn/{repository}/{sha256}/parts/{number}``: a part, which stays until all are there."""
    repository = signed(request, "PUT")
    draft = repository.lfs.draft()
    try:
        await _receive(request, draft)
        etag = draft.sha256[:32]
        draft.move_to(_parts_folder(repository, param(request, "oid")) / f"{int(param(request, 'number')):05d}")
    finally:
        draft.drop()
    return Response(headers={"ETag": f'"{etag}"'})


async def complete(request: Request) -> Response:
    """``POST …/complete``: the parts, in the order that the client names, become the object."""
    repository, oid = signed(request, "POST"), param(request, "oid")
    folder = _parts_folder(repository, oid)
    try:
        numbers = [int(part["partNumber"]) for part in (await json_body(request)).get("parts", [])]
    except (KeyError, TypeError, ValueError) as error:
        raise refusal(400, "each part must have a partNumber") from error
    files = [folder / f"{number:05d}" for number in numbers]
    if not files or not all(file.is_file() for file in files):
        raise refusal(400, "a part is named that was not uploaded")
    draft = repository.lfs.draft()
    try:
        await _join(files, draft)
        _keep(hub_of(request), repository, draft, oid)
    finally:
        draft.drop()
    shutil.rmtree(folder)
    return JSONResponse({"success": True})


async def verify(request: Request) -> Response:
    """``POST …/verify``: whether the object is here, with the size that the client says."""
    repository, body = writing(request), await json_body(request)
    oid = body.get("oid", "")
    if not is_sha256(oid) or not repository.lfs.has(oid):
        raise refusal(404, f"no object {oid}")
    if repository.lfs.size_bytes(oid) != body.get("size"):
        raise refusal(422, f"the object {oid} has {repository.lfs.size_bytes(oid)} bytes, not {body.get('size')}")
    return JSONResponse({"message": "the object is here"})


async def _receive(request: Request, draft: Draft) -> None:
    async for piece in request.stream():
        draft.write(piece)


async def _join(files: list[Path], draft: Draft) -> None:
    for file in files:
        for piece in pieces_of(file):
            draft.write(piece)
            await asyncio.sleep(0)  # others are served in between


def _keep(hub: Hub, repository: Repository, draft: Draft, oid: str) -> None:
    hub.sent[oid] += 1
    if draft.sha256 != oid:
        raise refusal(400, f"the bytes that came have the SHA-256 {draft.sha256}, not {oid}")
    repository.lfs.keep(draft)


def _place(repository: Repository, oid: str) -> str:
    return f"/cdn/{PLURALS[repository.repo_type]}/{repository.repo_id}/{oid}"


def _parts_folder(repository: Repository, oid: str) -> Path:
    return repository.folder / "parts" / oid


ROUTES = [
    Route("/{kind}/{namespace}/{name}.git/info/lfs/objects/batch", batch, methods=["POST"]),
    Route("/{namespace}/{name}.git/info/lfs/objects/batch", batch, methods=["POST"]),
    Route("/{kind}/{namespace}/{name}.git/info/lfs/objects/verify", verify, methods=["POST"]),
    Route("/{namespace}/{name}.git/info/lfs/objects/verify", verify, methods=["POST"]),
    Route("/cdn/{kind}/{namespace}/{name}/{oid}", put_object, methods=["PUT"]),
    Route("/cdn/{kind}/{namespace}/{name}/{oid}/parts/{number}", put_part, methods=["PUT"]),
    Route("/cdn/{kind}/{namespace}/{name}/{oid}/complete", complete, methods=["POST"]),
]
