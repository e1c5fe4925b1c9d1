"""Identity: one canonical hash of all that changes an activation.

``fingerprint`` hashes any JSON-like mapping the same way on every machine; ``content_hash``
hashes files by their names and what they hold, wherever they lie; ``text_digest`` and ``tokens_digest`` are the
short keys by which the cache finds prompts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

DIGEST_BYTES = 16
_READ_BYTES = 1 << 22


def fingerprint(identity: Mapping[str, Any]) -> str:
    """Hex SHA-256 of ``identity`` in canonical JSON: sorted keys, no spaces, UTF-8."""
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def text_digest(text: str) -> bytes:
    """16-byte key of a text; lone surrogates are kept apart from the characters they resemble."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()


def tokens_digest(token_ids: NDArray[np.int32], positions: NDArray[np.int32] | None = None) -> bytes:
    """16-byte key of a token sequence [tokens], and of the positions chosen in it where they are its own."""
    state = hashlib.blake2b(np.ascontiguousarray(token_ids, "<i4").tobytes(), digest_size=DIGEST_BYTES)
    if positions is not None:
        state.update(b"|positions|" + np.ascontiguousarray(positions, "<i4").tobytes())
    return state.digest()


def content_hash(files: Sequence[Path]) -> str:
    """``sha256:…`` of files by name and content, read side by side; the order given does not matter."""
    ordered = sorted(files, key=lambda file: file.name)
    with ThreadPoolExecutor() as pool:
        hashes = list(pool.map(_file_hash, ordered))
    named = {file.name: digest for file, digest in zip(ordered, hashes, strict=True)}
    return "sha256:" + fingerprint(named)


def _file_hash(file: Path) -> str:
    state = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(_READ_BYTES):
            state.update(block)
    return state.hexdigest()
