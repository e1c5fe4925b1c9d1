"""Sealing: a shard's file, once its rows are in it, is packed where that was asked, and hashed.

It takes time that the model need not wait for, and may be done again from the file. So the shard counts as made
before: as long as the machine is not started anew, what was written into a file is in it, even if the process is
killed.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

from streamtap.codec import compress_file
from streamtap.harvest.record import ShardRecord
from streamtap.harvested.fetching import file_sha256

_ZSTD = ".zst"


def shard_key(number: int, compression: str) -> str:
    """Name of a shard's file."""
    return f"shard_{number:05d}.safetensors" + (_ZSTD if compression == "zstd" else "")


def file_of(record: ShardRecord, folder: Path) -> Path:
    """Where a shard's file lies in the spool: packed where it is sealed, else as its rows were written."""
    return folder / (record.entry.key if record.is_sealed else record.entry.key.removesuffix(_ZSTD))


def seal(record: ShardRecord, folder: Path) -> ShardRecord:
    """Pack and hash the file in ``folder``; what was not packed is left there beside it."""
    written, path = file_of(record, folder), folder / record.entry.key
    if path != written:
        packed = folder / f"{record.entry.key}.packed"
        try:
            compress_file(written, packed)
        except BaseException:
            packed.unlink(missing_ok=True)
            raise
        packed.replace(path)
    entry = replace(record.entry, sha256=file_sha256(path), bytes=path.stat().st_size)
    return replace(record, entry=entry, boot="")


@cache
def this_boot() -> str:
    """What tells this boot of the machine from any other; empty where it does not say."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""
