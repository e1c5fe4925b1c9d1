"""Which files a Xet store holds, read from its shards.

A shard is a header of 48 bytes, then one record for each file: its Xet hash, flags and a count, that many entries, as
many again where the file can be verified, and the SHA-256 of the content. Each of these has 48 bytes; a record whose
hash is all ones ends the list.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

_RECORD_BYTES = 48
_HASH_BYTES = 32
_VERIFIED, _HAS_SHA256 = 1 << 31, 1 << 30


def files_of(shard: Path) -> Iterator[tuple[str, str]]:
    """SHA-256 and Xet hash of every file, both in hexadecimal."""
    content = shard.read_bytes()
    place = _RECORD_BYTES
    while (record := content[place : place + _RECORD_BYTES])[:_HASH_BYTES] != b"\xff" * _HASH_BYTES:
        if len(record) < _RECORD_BYTES:
            return
        flags, count = struct.unpack_from("<II", record, _HASH_BYTES)
        place += _RECORD_BYTES * (1 + count * (2 if flags & _VERIFIED else 1))
        if flags & _HAS_SHA256:
            yield _hexadecimal(content[place : place + _HASH_BYTES]), _hexadecimal(record[:_HASH_BYTES])
            place += _RECORD_BYTES


def _hexadecimal(words: bytes) -> str:
    # Xet writes a hash as four little-endian words.
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", words))
