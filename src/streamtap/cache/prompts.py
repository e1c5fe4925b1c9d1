"""What the index remembers of prompts and texts, so that a warm run needs no tokenizer."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from streamtap.cache.index import select_in
from streamtap.cache.values import PromptKey
from streamtap.errors import InvalidInput, NotCached


def check_digests(digests: Sequence[bytes], what: str = "digests") -> None:
    """Refuse keys that no digest function made.

    Raises:
        InvalidInput: one that is not 16 bytes.
    """
    for place, digest in enumerate(digests):
        if not isinstance(digest, bytes) or len(digest) != 16:
            raise InvalidInput(f"{what} are 16 bytes each, from streamtap.fingerprint; place {place} is not.")


def add_prompts(db: sqlite3.Connection, keys: Iterable[PromptKey]) -> None:
    """Keep the token ids of prompts that are not known yet."""
    db.executemany(
        "INSERT OR IGNORE INTO prompts VALUES (?, ?, ?)",
        ((key.digest, _packed(key.token_ids), _packed(key.positions)) for key in keys),
    )


def add_texts(
    db: sqlite3.Connection,
    context: bytes,
    texts: Sequence[bytes],
    keys: Sequence[PromptKey],
    notes: Sequence[int],
) -> None:
    """Remember which prompt each text became under ``context``."""
    add_prompts(db, keys)
    db.executemany(
        "INSERT OR REPLACE INTO texts VALUES (?, ?, ?, ?)",
        ((context, text, key.digest, int(note)) for text, key, note in zip(texts, keys, notes, strict=True)),
    )


def find_texts(db: sqlite3.Connection, context: bytes, texts: Sequence[bytes]) -> list[tuple[bytes, int] | None]:
    """Prompt digest and note of each text, or None, in the order asked."""
    # Whoever asks under every context that there could be is told at once of those that there are not.
    if db.execute("SELECT 1 FROM texts WHERE context = ? LIMIT 1", (context,)).fetchone() is None:
        return [None] * len(texts)
    sql = "SELECT text, digest, note FROM texts WHERE context = ? AND text IN ({keys})"
    found = {text: (digest, note) for text, digest, note in select_in(db, sql, [context], texts)}
    return [found.get(text) for text in texts]


def find_tokens(
    db: sqlite3.Connection, digests: Sequence[bytes]
) -> list[tuple[NDArray[np.int32], NDArray[np.int32] | None]]:
    """Token ids and own positions of each prompt, in the order asked.

    Raises:
        NotCached: a prompt that the index does not know.
    """
    sql = "SELECT digest, token_ids, positions FROM prompts WHERE digest IN ({keys})"
    found = {row[0]: (_unpacked(row[1]), _maybe_unpacked(row[2])) for row in select_in(db, sql, [], digests)}
    absent = [place for place, digest in enumerate(digests) if digest not in found]
    if absent:
        raise NotCached(f"the token ids of {len(absent)} of {len(digests)} prompts are not cached: {listed(absent)}.")
    return [found[digest] for digest in digests]


def listed(places: Sequence[int]) -> str:
    """Indices of prompts for a message, the first few of them."""
    shown = ", ".join(map(str, places[:8]))
    return f"prompts {shown}" + (", …" if len(places) > 8 else "")


def _packed(values: NDArray[np.int32] | None) -> bytes | None:
    return None if values is None else np.ascontiguousarray(values, "<i4").tobytes()


def _unpacked(data: bytes) -> NDArray[np.int32]:
    return np.frombuffer(data, "<i4").astype(np.int32)


def _maybe_unpacked(data: bytes | None) -> NDArray[np.int32] | None:
    return None if data is None else _unpacked(data)
