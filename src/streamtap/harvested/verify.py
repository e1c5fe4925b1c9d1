"""Compares a run's files with what its manifest says of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from streamtap.errors import HarvestDamaged
from streamtap.harvested.file_bytes import AGAIN, missing
from streamtap.harvested.manifest import HarvestManifest, ShardEntry
from streamtap.harvested.places import Place
from streamtap.harvested.shard_reader import HarvestedShard, file_name

_BLOCK_BYTES = 1 << 23


def verify_run(place: Place, manifest: HarvestManifest, advance: Callable[[int], None] | None = None) -> None:
    """Compare every shard file's size, hash and header; ``advance`` is told of bytes that were hashed.

    Raises:
        HarvestDamaged: one is missing or differs; the first is named.
        TransferFailed: the store fails.
    """
    for number, entry in enumerate(manifest.shards):
        _check_sum(place, entry, advance)
        HarvestedShard(place, manifest, number).check()


def _check_sum(place: Place, entry: ShardEntry, advance: Callable[[int], None] | None) -> None:
    where = f"{file_name(entry)} of {place.url}"
    state, size = hashlib.sha256(), 0
    try:
        for block in _blocks(place, file_name(entry), entry.bytes):
            state.update(block)
            size += len(block)
            if advance is not None:
                advance(len(block))
    except FileNotFoundError as error:
        raise missing(where) from error
    if size != entry.bytes:
        more = "more" if size > entry.bytes else str(size)
        raise HarvestDamaged(f"{where} has {more} bytes, and the manifest says {entry.bytes}; {AGAIN}.")
    if state.hexdigest() != entry.sha256:
        raise HarvestDamaged(f"{where} has another content than the manifest says; {AGAIN}.")


def _blocks(place: Place, name: str, size_bytes: int) -> Iterator[bytes]:
    """A file from its first byte to one behind what it should have; the next block is fetched while one is hashed."""
    with ThreadPoolExecutor(1, thread_name_prefix="streamtap-verify") as pool:
        coming = pool.submit(place.get_range, name, 0, min(_BLOCK_BYTES, size_bytes + 1))
        for start in range(_BLOCK_BYTES, size_bytes + 1, _BLOCK_BYTES):
            block, coming = (
                coming.result(),
                pool.submit(place.get_range, name, start, min(start + _BLOCK_BYTES, size_bytes + 1)),
            )
            yield block
        yield coming.result()
