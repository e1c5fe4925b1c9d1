"""Format 1.x to 2.0: the metadata moves into the index, and no tensor moves."""

from __future__ import annotations

from contextlib import closing

import numpy as np

from streamtap.dataset.described import to_metadata
from streamtap.dataset.index import IndexFile, rewrite_index
from streamtap.dataset.names import INDEX, SIDECAR, STAGE_MARK
from streamtap.dataset.places import Target
from streamtap.errors import DatasetNotFound

# Version 1.2 named the same places twice.
_TWICE = {"shard_index_hidden": "shard_index", "row_offset_hidden": "row_offset", "token_offset_hidden": "token_offset"}


def upgrade(target: Target, *, remove_json: bool = True, dry_run: bool = False) -> str:
    """Upgrade the dataset in ``target``, in one step, and return its address; one of version 2 is left as it is.

    ``dry_run`` reads everything and writes nothing.

    Raises:
        DatasetNotFound: no dataset there.
        DatasetDamaged: metadata that means nothing.
        TransferFailed: the server failed for too long; nothing was changed.
    """
    with closing(target):
        found = target.look()
        if found is None or INDEX not in found.files:
            raise DatasetNotFound(f"{target.name} holds no activation dataset: there is no {INDEX}.")
        source = target.source()
        old = source.fetch(INDEX)
        index = IndexFile(old, source)
        if not index.manifest.format_version.startswith("1.") or dry_run:
            return target.url
        new = target.room(INDEX)
        rewrite_index(old, new, to_metadata(index.manifest), without=_doubles(index))
        leftovers = [path for path in (SIDECAR, STAGE_MARK) if path in found.files] if remove_json else []
        return target.publish({INDEX: new}, leftovers, "Upgrade the dataset's metadata to format 2.0")


def _doubles(index: IndexFile) -> frozenset[str]:
    pairs = [(old, new) for old, new in _TWICE.items() if index.has(old) and index.has(new)]
    return frozenset(old for old, new in pairs if np.array_equal(index.ints(old), index.ints(new)))
