"""Publishing: pack rows into shards, send them, and make them a dataset in one last step."""

from __future__ import annotations

import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import PurePath

from streamtap.dataset.card import make_card
from streamtap.dataset.checked import is_content
from streamtap.dataset.contents import GIB, Contents, Plan, describe, make_plan, packed_bytes
from streamtap.dataset.described import to_metadata
from streamtap.dataset.index import read_footer, write_index
from streamtap.dataset.index_rows import index_batches
from streamtap.dataset.manifest import Manifest
from streamtap.dataset.names import CARD, INDEX, is_ours
from streamtap.dataset.outbox import Outbox
from streamtap.dataset.packing import pack
from streamtap.dataset.places import Advance, Found, Target, no_advance
from streamtap.errors import DatasetDamaged, DatasetExists, DatasetNotFound, NotEnoughSpace, Unsupported


def publish(
    contents: Contents,
    target: Target,
    *,
    plan: Plan | None = None,
    shard_max_bytes: int = GIB,
    exist_ok: bool = False,
    stream: bool = False,
    advance: Advance = no_advance,
) -> str:
    """Publish ``contents`` and return the address. What is there already, equal, is left as it is.

    ``stream`` sends each shard as soon as it is packed, so that only a few are on this machine; else all are packed
    before the first is sent. ``advance`` is told of bytes packed, and again when they were sent to where that takes
    time (``work_bytes`` in all). ``plan`` is the one that ``make_plan`` made, where it is known.

    Raises:
        DatasetExists: the place holds something else, and ``exist_ok`` is False.
        InvalidInput: contents or a shard size that cannot be.
        NotEnoughSpace: the disk cannot take what is packed.
        TransferFailed: the server failed for too long. What it has already need not be sent again.
    """
    with closing(target):
        plan = plan or make_plan(contents, shard_max_bytes)
        found = target.look()
        if found is not None and is_same(contents, target, found, read_all=exist_ok):
            return target.url
        _refuse_other(target, found, exist_ok)
        if target.is_local or not stream:
            _require_space(target, packed_bytes(contents, plan))
        sent = no_advance if target.is_local else advance
        with Outbox(target, stream=stream or target.is_local, sent=sent) as outbox:
            pack(contents, plan, outbox, advance)
            files = outbox.finish()
        return _finish(contents, plan, replace(describe(contents, plan), files=files), target, found)


def work_bytes(contents: Contents, plan: Plan, target: Target) -> int:
    """What ``publish`` will have told ``advance`` in the end."""
    return packed_bytes(contents, plan) * (1 if target.is_local else 2)


def public_name(name: str) -> str:
    """What a stranger calls a dataset: of a folder only its own name, for where it lies here is nobody's business."""
    return f"./{PurePath(name).name}" if name.startswith(("/", ".", "~")) else name


def is_same(contents: Contents, target: Target, found: Found, *, read_all: bool = False) -> bool:
    """Whether the place holds exactly these contents, whole.

    Sizes are compared, and hashes where the place knows them; ``read_all`` reads the files of a local one too.
    """
    if INDEX not in found.files:
        return False
    source = target.source()
    try:
        manifest = read_footer(source).manifest
    except (DatasetNotFound, DatasetDamaged, Unsupported):
        return False
    if manifest.content != contents.content:
        return False
    for path, about in manifest.files.items():
        if found.files.get(path) != about.size_bytes or found.sums.get(path, about.sha256) != about.sha256:
            return False
        if read_all and target.is_local and not is_content(source.fetch(path), about):
            return False
    return True


def _require_space(target: Target, n_bytes: int) -> None:
    free = shutil.disk_usage(target.room(CARD).parent).free
    if n_bytes > free:
        hint = "" if target.is_local else " stream=True (--stream) needs room for three shards alone."
        raise NotEnoughSpace(
            f"packing {target.name} takes {n_bytes / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free.{hint}"
        )


def _finish(contents: Contents, plan: Plan, manifest: Manifest, target: Target, found: Found | None) -> str:
    index, card = target.room(INDEX), target.room(CARD)
    write_index(index, index_batches(contents, plan), to_metadata(manifest))
    text = make_card(manifest, contents.description, contents.license, public_name(target.name))
    card.write_text(text, encoding="utf-8")
    kept = {INDEX, CARD, *manifest.files}
    stale = sorted(path for path in (found.files if found else ()) if is_ours(path) and path not in kept)
    return target.publish({INDEX: index, CARD: card}, stale, f"Publish activations of {contents.model}")


def _refuse_other(target: Target, found: Found | None, exist_ok: bool) -> None:
    others = [path for path in found.files if path != ".gitattributes"] if found is not None else []
    if others and not exist_ok:
        raise DatasetExists(
            f"{target.name} holds {len(others)} files of something else ({others[0]}, …); "
            "publish under another name, or replace what is there with exist_ok=True (--replace)."
        )
